//! The command line: what was typed, what it means, and how results are shown.
//!
//! Results go to stdout, everything else to stderr. Exit status: 0 done, 1 refused or failed, 2 usage,
//! 130 and 143 ended by SIGINT and SIGTERM.

mod args;
mod bench;
mod devices;
mod library;
mod page;
mod print;
mod progress;
mod run;
mod sigbus;
mod signals;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::Parser;

/// Runs the command and gives its exit status.
pub fn main() -> ExitCode {
    let args = args::Args::parse();
    let level = match args.verbose {
        0 => tracing::Level::WARN,
        1 => tracing::Level::INFO,
        _ => tracing::Level::DEBUG,
    };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        .init();
    match run::run(args.command) {
        Ok(code) => code,
        Err(error) => {
            let closed =
                error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe);
            if closed {
                return ExitCode::SUCCESS;
            }
            let _ = writeln!(std::io::stderr(), "error: {error}");
            ExitCode::from(1)
        }
    }
}
