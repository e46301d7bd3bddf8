//! How far encoded tensors are from what was decoded, as manifests and reports say it.

use serde::{Deserialize, Serialize};

use super::manifest::FileEntry;
use crate::encode;

/// How many tensors a report names.
const NAMED: usize = 10;

/// How far an encoded tensor of one rank is from the decoded source, in numbers of four digits.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Deviation {
    /// The root of the mean squared error over the root of the mean square of the values.
    pub relative_rms: f64,
    /// The largest error, in the units of the weights.
    pub largest_error: f64,
}

/// Neither is ever NaN: what is not finite counts nothing.
impl Eq for Deviation {}

impl From<encode::Deviation> for Deviation {
    fn from(found: encode::Deviation) -> Self {
        Deviation {
            relative_rms: four_digits(found.relative_rms()),
            largest_error: four_digits(f64::from(found.largest_error())),
        }
    }
}

/// A number that reads back the same from its text, whatever reads it.
fn four_digits(number: f64) -> f64 {
    let finite = if number.is_finite() { number } else { f64::MAX };
    format!("{finite:.3e}").parse().unwrap_or(f64::MAX)
}

/// The encoded tensors that are furthest from the source.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Worst(Vec<Deviating>);

/// An encoded tensor in one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Deviating {
    /// Its name.
    pub tensor: String,
    /// The file that holds it.
    pub file: String,
    /// How far it is from the source.
    #[serde(flatten)]
    pub deviation: Deviation,
}

impl Worst {
    /// Looks at the tensors of a file.
    pub fn add(&mut self, file: &FileEntry) {
        for tensor in &file.tensors {
            let Some(deviation) = tensor.deviation else { continue };
            let order = |other: &Deviating| other.deviation.relative_rms >= deviation.relative_rms;
            let at = self.0.partition_point(order);
            if at < NAMED {
                let (tensor, file) = (tensor.name.clone(), file.name.clone());
                self.0.insert(at, Deviating { tensor, file, deviation });
                self.0.truncate(NAMED);
            }
        }
    }

    /// Those that were found, the worst first.
    pub fn tensors(&self) -> &[Deviating] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_four_digits_and_are_finite() {
        assert_eq!(four_digits(0.026_134_99), 0.026_13);
        assert_eq!(four_digits(0.0), 0.0);
        assert!(four_digits(f64::NAN).is_finite() && four_digits(f64::INFINITY).is_finite());
        for number in [1.234e-12, 9.999e20, 0.1] {
            let text = serde_json::to_string(&four_digits(number)).unwrap();
            assert_eq!(serde_json::from_str::<f64>(&text).unwrap(), four_digits(number));
        }
    }
}
