//! Reports as Python dictionaries.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use serde::Serialize;

/// The dictionary that a report's JSON reads as: the same as the program's `--json`.
pub fn to_dict<'py>(py: Python<'py>, value: &(impl Serialize + Sync)) -> PyResult<Bound<'py, PyAny>> {
    let text = py.detach(|| serde_json::to_string(value)).map_err(|e| PyRuntimeError::new_err(e.to_string()))?;
    py.import("json")?.call_method1("loads", (text,))
}
