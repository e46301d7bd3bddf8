//! Work on several threads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::error::Result;

/// Most threads that are started, whatever is asked for; each has buffers of its own.
const MOST_THREADS: usize = 1024;

/// How many threads are meant: 0 stands for one per CPU.
pub(crate) fn count(threads: usize) -> usize {
    match threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    }
}

/// Runs `work` on `threads` threads, this one among them; 0 for one per CPU.
pub(crate) fn on_threads(threads: usize, work: impl Fn() + Sync) {
    std::thread::scope(|scope| {
        for _ in 1..count(threads).min(MOST_THREADS) {
            // A thread that cannot be started is one fewer, and so are those after it; this one does the rest.
            if std::thread::Builder::new().spawn_scoped(scope, &work).is_err() {
                break;
            }
        }
        work();
    });
}

/// Shares the numbers below `end` among threads, each of which works with a `T` of its own. The first failure ends it.
pub(crate) fn share_out<T: Default>(
    threads: usize,
    end: u64,
    work: impl Fn(&mut T, u64) -> Result<()> + Sync,
) -> Result<()> {
    let next = AtomicU64::new(0);
    let failure = Mutex::new(None);
    on_threads(threads, || {
        let mut own = T::default();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= end {
                return;
            }
            if let Err(error) = work(&mut own, number) {
                lock(&failure).get_or_insert(error);
                next.store(end, Ordering::Relaxed);
            }
        }
    });
    into_inner(failure).map_or(Ok(()), Err)
}

/// As [`lock`], for a lock that nobody else has any more.
pub(crate) fn into_inner<T>(mutex: Mutex<T>) -> T {
    mutex.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// The value behind a lock, also after a thread has panicked with it: what it holds is checked where it is used.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until somebody says that what the lock guards has changed.
pub(crate) fn wait<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
}
