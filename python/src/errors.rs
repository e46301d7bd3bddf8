//! The library's errors as Python exceptions. The classes are Python: `ggshard/errors.py`.

use ggshard::Error;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The name of the exception class for an error.
fn class(error: &Error) -> &'static str {
    match error {
        Error::Io { .. } => "IoError",
        Error::Container(_) => "ContainerError",
        Error::Truncated(_) => "TruncatedError",
        Error::Unsupported(_) => "UnsupportedError",
        Error::Split(_) => "SplitError",
        Error::Rules(_) => "RulesError",
        Error::NoMapping(_) => "NoMappingError",
        Error::MissingTensor(_) => "MissingTensorError",
        Error::UnknownTensor(_) => "UnknownTensorError",
        Error::Contradiction(_) => "ContradictionError",
        Error::Layout(_) => "LayoutError",
        Error::Audit(_) => "AuditError",
        Error::Nonfinite(_) => "NonfiniteError",
        Error::Output(_) => "OutputError",
        Error::Checkpoint(_) => "CheckpointError",
        Error::Device(_) => "DeviceError",
        // The enum grows: what has no class of its own, such as a stop that was asked for, is the common one.
        _ => "GgshardError",
    }
}

/// The exception that an error becomes. Needs no attached interpreter: it attaches by itself.
pub fn raise(error: Error) -> PyErr {
    Python::attach(|py| exception(py, &error).unwrap_or_else(|failure| failure))
}

fn exception(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let fault = error.fault();
    let parts = PyDict::new(py);
    parts.set_item("file", fault.file.as_ref().map(|f| f.to_string_lossy()))?;
    parts.set_item("tensor", &fault.tensor)?;
    parts.set_item("key", &fault.key)?;
    parts.set_item("offset", fault.offset)?;
    parts.set_item("found", &fault.found)?;
    parts.set_item("expected", &fault.expected)?;
    parts.set_item("remedy", &fault.remedy)?;
    let class = py.import("ggshard.errors")?.getattr(class(error))?;
    let exception = class.call((error.to_string(),), Some(&parts))?;
    if let Error::Io { source, .. } = error {
        exception.setattr("errno", source.raw_os_error())?;
    }
    Ok(PyErr::from_value(exception))
}
