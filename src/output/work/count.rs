//! Counts of values that are not finite: kept per file and tensor, told per parameter.

use std::collections::{BTreeMap, HashSet};

use super::record::Counted;
use crate::output::filename;
use crate::output::manifest::{FileEntry, Parameter};

/// The parameters with what was counted in `files`. A slice that several ranks hold counts once.
pub(super) fn parameters(parameters: &[Parameter], files: &[(FileEntry, Vec<Counted>)]) -> Vec<Parameter> {
    let mut seen = HashSet::new();
    let mut totals: BTreeMap<(&str, &str), (u64, u64, u64)> = BTreeMap::new();
    for (file, counted) in files {
        for count in counted {
            let Some(tensor) = file.tensors.get(count.tensor) else { continue };
            let key = (filename::folder(&file.name), tensor.name.as_str());
            if seen.insert((key, count.first_rank)) {
                let total = totals.entry(key).or_default();
                *total = (total.0 + count.nan, total.1 + count.inf, total.2 + count.overflow);
            }
        }
    }
    let with_counts = |parameter: &Parameter| {
        let found = totals.get(&(parameter.set.as_str(), parameter.name.as_str())).copied();
        let (nan, inf, overflow) = found.unwrap_or_default();
        Parameter { nan, inf, overflow, ..parameter.clone() }
    };
    parameters.iter().map(with_counts).collect()
}
