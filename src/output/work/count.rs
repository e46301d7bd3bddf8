//! Counts of values that are not finite: kept per file and tensor, told per parameter.

use std::collections::{BTreeMap, HashSet};

use super::record::Counted;
use crate::dequant::Nonfinite;
use crate::output::filename;
use crate::output::manifest::{FileEntry, Parameter};

/// What was counted in some files, by parameter.
#[derive(Debug, Default)]
pub struct Counts {
    /// What was counted already: set, name, and the first of the ranks that hold the very same slice.
    seen: HashSet<(String, String, u32)>,
    /// By set and name; none without any.
    totals: BTreeMap<(String, String), Nonfinite>,
}

impl Counts {
    /// Adds what was counted in a file. A slice that several ranks hold counts once.
    pub fn add(&mut self, file: &FileEntry, counted: &[Counted]) {
        for &Counted { tensor, first_rank, nan, inf, overflow } in counted {
            let Some(tensor) = file.tensors.get(tensor) else { continue };
            let (set, name) = (filename::folder(&file.name).to_owned(), tensor.name.clone());
            if self.seen.insert((set.clone(), name.clone(), first_rank)) {
                *self.totals.entry((set, name)).or_default() += Nonfinite { nan, inf, overflow };
            }
        }
    }

    /// What was counted in the whole parameters, before this.
    pub fn of(parameters: &[Parameter]) -> Self {
        let some = parameters.iter().filter(|p| p.nan + p.inf + p.overflow > 0);
        let total = |p: &Parameter| Nonfinite { nan: p.nan, inf: p.inf, overflow: p.overflow };
        Counts { totals: some.map(|p| ((p.set.clone(), p.name.clone()), total(p))).collect(), ..Counts::default() }
    }

    /// NaN, infinite and overflowed values by name, those of a set in a sub-folder with that.
    pub fn by_name(&self) -> BTreeMap<String, (u64, u64, u64)> {
        let name = |set: &str, name: &str| if set.is_empty() { name.to_owned() } else { format!("{set}/{name}") };
        let some = self.totals.iter().filter(|(_, found)| found.any());
        some.map(|((s, n), found)| (name(s, n), (found.nan, found.inf, found.overflow))).collect()
    }

    /// The parameters with what was counted in them.
    pub fn fill(&self, parameters: &mut [Parameter]) {
        for parameter in parameters {
            let found = self.totals.get(&(parameter.set.clone(), parameter.name.clone())).copied();
            let Nonfinite { nan, inf, overflow } = found.unwrap_or_default();
            (parameter.nan, parameter.inf, parameter.overflow) = (nan, inf, overflow);
        }
    }
}
