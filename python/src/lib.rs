//! The compiled half of the Python package `ggshard`: thin over the library. What users call is in `ggshard/`.

use pyo3::prelude::*;

mod checkpoint;
mod device;
mod dlpack;
mod errors;
mod jobs;
mod json;
mod tensor;
mod watch;
mod weights;

/// The functions and classes that `ggshard/__init__.py` hands on.
#[pymodule]
mod _ggshard {
    #[pymodule_export]
    use crate::checkpoint::Rank;
    #[pymodule_export]
    use crate::device::DeviceTensor;
    #[pymodule_export]
    use crate::jobs::{convert, inspect, plan, seal, verify};
    #[pymodule_export]
    use crate::tensor::Tensor;
    #[pymodule_export]
    use crate::weights::{WeightIterator, iter_rank, iter_weights};

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name is Python's")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
