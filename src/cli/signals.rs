//! SIGINT and SIGTERM: the work ends in good order. A second one ends the program at once.

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use ggshard::error::Error;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// What is told to whoever ended a conversion before it was done.
pub fn how_to_resume() -> &'static str {
    "Run the same command again with --resume to go on."
}

/// The signals that have come.
pub struct Signals {
    cancel: Arc<AtomicBool>,
    /// The number of the last one; 0 for none.
    last: Arc<AtomicUsize>,
}

impl Signals {
    /// Heeds both signals from now on.
    pub fn heed() -> std::io::Result<Self> {
        let signals = Signals { cancel: Arc::default(), last: Arc::default() };
        for signal in [SIGINT, SIGTERM] {
            // In this order: the second signal finds the flag that the first has set.
            flag::register_conditional_shutdown(signal, status(signal), signals.cancel.clone())?;
            flag::register_usize(signal, signals.last.clone(), signal as usize)?;
            flag::register(signal, signals.cancel.clone())?;
        }
        Ok(signals)
    }

    /// Set when the work is to end.
    pub fn cancel(&self) -> Arc<AtomicBool> {
        self.cancel.clone()
    }

    /// The exit status of work that ended because of a signal, which is said on stderr with what is to be done.
    pub fn end<T>(&self, result: &Result<T, Error>, remedy: &str) -> Option<ExitCode> {
        let (name, signal) = match self.last.load(Ordering::SeqCst) as i32 {
            SIGINT => ("SIGINT (Ctrl-C)", SIGINT),
            SIGTERM => ("SIGTERM", SIGTERM),
            _ => return None,
        };
        match result {
            Err(Error::Cancelled(_)) => {
                let _ = writeln!(std::io::stderr(), "stopped by {name} before it was done. {remedy}");
                Some(ExitCode::from(status(signal) as u8))
            }
            Ok(_) | Err(_) => None,
        }
    }
}

/// The exit status of a program that a signal has ended, as shells have it.
fn status(signal: i32) -> i32 {
    128 + signal
}
