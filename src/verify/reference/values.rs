//! Comparing values of two element types, with sums in double precision.

use crate::dequant::FloatType;
use crate::dtype::Dtype;

/// How two element types are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Comparison {
    /// By value: both widen to f32 exactly. Ours, then theirs.
    Values(FloatType, FloatType),
    /// By bytes: elements of one type and of this many bytes, that have no distance from each other.
    Bytes(u64),
}

impl Comparison {
    /// The comparison between our type and theirs, if there is one.
    pub fn between(ours: Dtype, theirs: Dtype) -> Option<Self> {
        match (float(ours), float(theirs)) {
            (Some(ours), Some(theirs)) => Some(Comparison::Values(ours, theirs)),
            (Some(_) | None, Some(_) | None) => (ours == theirs).then(|| Comparison::Bytes(ours.bytes())),
        }
    }
}

fn float(dtype: Dtype) -> Option<FloatType> {
    [FloatType::F32, FloatType::BF16, FloatType::F16].into_iter().find(|float| float.name() == dtype.name())
}

/// Sums over the values of a tensor.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Tally {
    /// Values compared.
    pub values: u64,
    /// Values that differ. Two NaN are equal, as are both zeros.
    pub unequal: u64,
    /// Of them, those without a distance: one side is not finite, or the type has none.
    pub distant: u64,
    /// The first value that differs.
    pub first: Option<First>,
    /// Sum of squares of the differences between finite values.
    pub error: f64,
    /// Sum of squares of the reference's finite values.
    pub reference: f64,
}

/// The first value that differs.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct First {
    /// The share that it is in.
    pub share: usize,
    /// Its place in the whole tensor.
    pub element: u64,
    /// What the checkpoint has, as text.
    pub ours: String,
    /// What the reference has, as text.
    pub theirs: String,
}

impl Tally {
    /// rms(ours − theirs) / rms(theirs): 0 for equal values, infinite where there is no such number.
    pub fn relative_rms(&self) -> f64 {
        if self.distant > 0 || (self.error > 0.0 && self.reference == 0.0) {
            f64::INFINITY
        } else if self.error == 0.0 {
            0.0
        } else {
            (self.error / self.reference).sqrt()
        }
    }

    /// Adds a chunk. `element` gives the place in the whole tensor of the chunk's i-th element.
    pub fn add(
        &mut self,
        comparison: Comparison,
        ours: &[u8],
        theirs: &[u8],
        share: usize,
        element: &dyn Fn(u64) -> u64,
    ) {
        let first = |i: usize, ours: String, theirs: String| First { share, element: element(i as u64), ours, theirs };
        match comparison {
            Comparison::Bytes(width) => {
                let pairs = ours.chunks_exact(width as usize).zip(theirs.chunks_exact(width as usize));
                for (i, (a, b)) in pairs.enumerate() {
                    self.values += 1;
                    if a != b {
                        self.unequal += 1;
                        self.distant += 1;
                        self.first.get_or_insert_with(|| first(i, format!("{a:02x?}"), format!("{b:02x?}")));
                    }
                }
            }
            Comparison::Values(our_type, their_type) => {
                // In pieces that stay in the first-level cache.
                let piece = Vec::with_capacity(PIECE);
                let (mut a, mut b) = (piece.clone(), piece);
                let our_pieces = ours.chunks(PIECE * our_type.bytes());
                let their_pieces = theirs.chunks(PIECE * their_type.bytes());
                for (number, (ours, theirs)) in our_pieces.zip(their_pieces).enumerate() {
                    widen(our_type, ours, &mut a);
                    widen(their_type, theirs, &mut b);
                    let unequal = self.add_values(&a, &b);
                    if unequal > 0 && self.first.is_none() {
                        let at = a.iter().zip(&b).position(|(a, b)| !same(*a, *b));
                        self.first = at.map(|i| first(number * PIECE + i, a[i].to_string(), b[i].to_string()));
                    }
                }
            }
        }
    }

    /// Adds values and gives the number of those that differ.
    fn add_values(&mut self, ours: &[f32], theirs: &[f32]) -> u64 {
        const LANES: usize = 8;
        let mut error = [0.0_f64; LANES];
        let mut reference = [0.0_f64; LANES];
        let mut unequal = [0_u64; LANES];
        let (our_lanes, our_rest) = ours.as_chunks::<LANES>();
        let (their_lanes, their_rest) = theirs.as_chunks::<LANES>();
        for (a, b) in our_lanes.iter().zip(their_lanes) {
            for lane in 0..LANES {
                let (wide, b) = (f64::from(a[lane]), f64::from(b[lane]));
                error[lane] += (wide - b) * (wide - b);
                reference[lane] += b * b;
                unequal[lane] += u64::from(wide != b);
            }
        }
        for (lane, (a, b)) in our_rest.iter().zip(their_rest).enumerate() {
            let (a, b) = (f64::from(*a), f64::from(*b));
            error[lane] += (a - b) * (a - b);
            reference[lane] += b * b;
            unequal[lane] += u64::from(a != b);
        }
        let (mut error, mut reference): (f64, f64) = (error.iter().sum(), reference.iter().sum());
        let mut unequal: u64 = unequal.iter().sum();
        // Squares of finite f32 do not overflow an f64: a sum that is not finite had a value that is not.
        if !(error.is_finite() && reference.is_finite()) {
            (error, reference, unequal) = (0.0, 0.0, 0);
            for (a, b) in ours.iter().zip(theirs) {
                let (wide, b64) = (f64::from(*a), f64::from(*b));
                if same(*a, *b) {
                    reference += if b.is_finite() { b64 * b64 } else { 0.0 };
                    continue;
                }
                unequal += 1;
                if a.is_finite() && b.is_finite() {
                    error += (wide - b64) * (wide - b64);
                    reference += b64 * b64;
                } else {
                    self.distant += 1;
                }
            }
        }
        self.values += ours.len() as u64;
        self.unequal += unequal;
        self.error += error;
        self.reference += reference;
        unequal
    }
}

/// Values that are widened at a time.
const PIECE: usize = 4096;

/// Equal in value, or both NaN.
fn same(a: f32, b: f32) -> bool {
    a == b || (a.is_nan() && b.is_nan())
}

fn widen(from: FloatType, bytes: &[u8], to: &mut Vec<f32>) {
    to.clear();
    match from {
        FloatType::F32 => to.extend(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b))),
        FloatType::F16 => to.extend(bytes.as_chunks().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32())),
        FloatType::BF16 => {
            to.extend(bytes.as_chunks().0.iter().map(|b| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(ours: &[f32], theirs: &[f32]) -> Tally {
        let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
        let mut tally = Tally::default();
        let values = Comparison::between(Dtype::F32, Dtype::F32).unwrap();
        tally.add(values, &bytes(ours), &bytes(theirs), 0, &|i| i);
        tally
    }

    #[test]
    fn relative_rms_is_that_of_the_definition() {
        let theirs: Vec<f32> = (0..10_001).map(|i| (i as f32).sin()).collect();
        let ours: Vec<f32> = theirs.iter().enumerate().map(|(i, v)| v + (i % 3) as f32 * 1e-3).collect();
        let rms = |values: &mut dyn Iterator<Item = f64>| (values.map(|v| v * v).sum::<f64>() / 10_001.0).sqrt();
        let error = rms(&mut ours.iter().zip(&theirs).map(|(a, b)| f64::from(*a) - f64::from(*b)));
        let want = error / rms(&mut theirs.iter().map(|v| f64::from(*v)));
        let got = tally(&ours, &theirs);
        assert!((got.relative_rms() / want - 1.0).abs() < 1e-12);
        let unequal = ours.iter().zip(&theirs).filter(|(a, b)| a != b).count() as u64;
        assert_eq!((got.values, got.unequal, got.distant), (10_001, unequal, 0));
        assert_eq!(got.first.unwrap().element, 1);
    }

    #[test]
    fn values_that_are_not_finite_never_pass_as_near() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        assert_eq!(tally(&[1.0, nan, inf, -0.0], &[1.0, nan, inf, 0.0]).relative_rms(), 0.0);
        assert_eq!(tally(&[1.0, nan, inf], &[1.0, nan, inf]).unequal, 0);
        for (ours, theirs) in [(nan, 1.0), (1.0, nan), (inf, -inf), (1.0, inf), (inf, 1.0), (1.0, 0.0)] {
            let got = tally(&[ours], &[theirs]);
            assert_eq!((got.relative_rms(), got.unequal), (f64::INFINITY, 1), "{ours} {theirs}");
        }
        // An infinity that both have does not hide what else differs.
        assert_eq!(tally(&[inf, 2.0], &[inf, 1.0]).relative_rms(), 1.0);
        assert_eq!(tally(&[0.0], &[0.0]).relative_rms(), 0.0);
    }

    #[test]
    fn widening_is_exact_and_other_types_are_compared_by_bytes() {
        let mut out = Vec::new();
        widen(FloatType::BF16, &[0x80, 0x3F, 0x00, 0xC0], &mut out);
        assert_eq!(out, [1.0, -2.0]);
        widen(FloatType::F16, &[0x00, 0x3C, 0x01, 0x00], &mut out);
        assert_eq!(out, [1.0, 2.0_f32.powi(-24)]);
        assert_eq!(Comparison::between(Dtype::BF16, Dtype::F8E4M3), None);
        assert_eq!(Comparison::between(Dtype::F64, Dtype::F32), None);
        let mut tally = Tally::default();
        tally.add(Comparison::between(Dtype::I16, Dtype::I16).unwrap(), &[1, 0, 2, 0], &[1, 0, 3, 0], 0, &|i| i);
        assert_eq!((tally.values, tally.unequal, tally.relative_rms()), (2, 1, f64::INFINITY));
    }
}
