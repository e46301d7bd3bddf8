//! Work on several threads.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Most threads that are started, whatever is asked for; each has buffers of its own.
const MOST_THREADS: usize = 1024;

/// Runs `work` on `threads` threads, this one among them; 0 for one per CPU.
pub(crate) fn on_threads(threads: usize, work: impl Fn() + Sync) {
    let threads = match threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads.min(MOST_THREADS),
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // A thread that cannot be started is one fewer, and so are those after it; this one does the rest.
            if std::thread::Builder::new().spawn_scoped(scope, &work).is_err() {
                break;
            }
        }
        work();
    });
}

/// The value behind a lock, also after a thread has panicked with it: what it holds is checked where it is used.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
