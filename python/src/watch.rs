//! Long work with the interpreter released: progress is told, and Ctrl-C heard, by the thread that called.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::errors::raise;

/// How often the calling thread looks up: ten times a second.
const PERIOD: Duration = Duration::from_millis(100);

/// What the work and the caller share.
#[derive(Debug, Default)]
pub struct Meter {
    /// Bytes done.
    pub done: AtomicU64,
    /// Bytes to do.
    pub total: AtomicU64,
    /// Set when the caller wants an end.
    pub cancel: Arc<AtomicBool>,
}

/// Runs `work` on a thread of its own. An exception of `progress` or of a signal's handler ends it: the work heeds
/// [`Meter::cancel`], and its end is awaited, with whatever it clears away.
pub fn run<T: Send + 'static>(
    py: Python<'_>,
    progress: Option<Py<PyAny>>,
    work: impl FnOnce(&Meter) -> ggshard::Result<T> + Send + 'static,
) -> PyResult<T> {
    let meter = Arc::new(Meter::default());
    let (done, waiting) = mpsc::channel();
    let thread = {
        let meter = meter.clone();
        std::thread::Builder::new().spawn(move || {
            let result = work(&meter);
            // Nobody listens any more where an exception came first.
            let _ = done.send(());
            result
        })?
    };
    let (meter, progress) = (&meter, &progress);
    let tell = |py: Python<'_>| -> PyResult<()> {
        py.check_signals()?;
        let total = meter.total.load(Ordering::Relaxed);
        // Nothing is told before it is known how much there is to do.
        if let Some(progress) = progress.as_ref().filter(|_| total > 0) {
            progress.call1(py, (meter.done.load(Ordering::Relaxed).min(total), total))?;
        }
        Ok(())
    };
    py.detach(move || {
        while let Err(RecvTimeoutError::Timeout) = waiting.recv_timeout(PERIOD) {
            if let Err(exception) = Python::attach(tell) {
                meter.cancel.store(true, Ordering::Relaxed);
                // Its result no longer matters: the exception says why it ended.
                let _ = thread.join();
                return Err(exception);
            }
        }
        let result = thread.join().map_err(|_| PyRuntimeError::new_err("ggshard panicked; this is a defect"))?;
        let value = result.map_err(raise)?;
        Python::attach(tell)?;
        Ok(value)
    })
}
