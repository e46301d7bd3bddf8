//! SIGBUS: a mapped source has become shorter, or its disk has failed. The program ends with words instead of a crash.
//!
//! In the program only: in a library the handler would be one in somebody else's process. The standard library has a
//! handler of this signal too (for overflows of the stack, on some systems). It is replaced, not called, because it
//! restores the default action at once, and a second worker that faults would then end the process before a word is
//! said.

use std::ops::Range;
use std::path::Path;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use ggshard::error::Fault;

use super::signals::how_to_resume;

/// A mapped file, and what is said when an access to it fails. Never freed.
struct Mapped {
    addresses: Range<usize>,
    message: Box<[u8]>,
    next: *const Mapped,
}

/// The mapped files, the last first.
static MAPPED: AtomicPtr<Mapped> = AtomicPtr::new(std::ptr::null_mut());
/// Whether some thread is saying what happened.
static SPEAKING: AtomicBool = AtomicBool::new(false);

/// Takes note of a file that is mapped for a conversion.
pub fn converting(path: &Path, addresses: Range<usize>) {
    let before = "Nothing in the output folder passes for a checkpoint. When the file is whole again:";
    note(path, addresses, &format!("{before} {}", how_to_resume()));
}

/// Takes note of a file that is mapped by a command that writes nothing.
pub fn reading(path: &Path, addresses: Range<usize>) {
    note(path, addresses, "When the file is whole again, run the same command again.");
}

fn note(path: &Path, addresses: Range<usize>, remedy: &str) {
    let fault = Fault::new("the file became shorter while it was read, or its disk failed").file(path);
    let fault = fault.remedy(format!("{remedy} With --io pread this is an ordinary error, which says more."));
    // A progress bar may stand in the line.
    let message = format!("\nerror: {fault}\n").into_bytes().into_boxed_slice();
    let new = Box::leak(Box::new(Mapped { addresses, message, next: std::ptr::null() }));
    let mut first = MAPPED.load(Ordering::Acquire);
    loop {
        new.next = first;
        match MAPPED.compare_exchange_weak(first, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => break,
            Err(other) => first = other,
        }
    }
    static INSTALL: Once = Once::new();
    INSTALL.call_once(install);
}

fn install() {
    // SAFETY: all zero bytes are a valid `sigaction` (no flags, an empty mask), whose fields are then set. `handler` has
    // the signature that SA_SIGINFO asks for and does only what a handler may do. A failure leaves the default action.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
    }
}

/// Runs inside whatever a worker was doing: no allocation, no lock, nothing but atomics and async-signal-safe calls.
extern "C" fn handler(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the system gives a valid `info` to a handler with SA_SIGINFO, and for SIGBUS it has an address. Entries of
    // the list are complete before they can be reached and never freed. `signal`, `write`, `pause` and `_exit` are
    // async-signal-safe.
    unsafe {
        let address = (*info).si_addr() as usize;
        let mut entry: *const Mapped = MAPPED.load(Ordering::Acquire);
        while let Some(mapped) = entry.as_ref() {
            if mapped.addresses.contains(&address) {
                while SPEAKING.swap(true, Ordering::AcqRel) {
                    libc::pause();
                }
                libc::write(libc::STDERR_FILENO, mapped.message.as_ptr().cast(), mapped.message.len());
                libc::_exit(1);
            }
            entry = mapped.next;
        }
        // Not a source: on return the access is made again, and ends the program as it would have without a handler.
        libc::signal(signal, libc::SIG_DFL);
    }
}
