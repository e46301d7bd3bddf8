//! Areas: values that a lane decodes on its device, and encodes there. One of the five files of this folder with `unsafe`.
//!
//! ```text
//! input (pinned) ─► source ─► kernels ─► values (f32) ─► kernels ─► codes and scales ─► output (pinned)
//! ```
//!
//! The values share the memory of a lane's pieces with what becomes of them, behind what is copied back.

use std::ops::Range;
use std::slice;

use super::device::{Memory, Stream, refused};
use super::driver::DriverError;
use super::encode::{Encode, Encoder, Found};
use super::lane::{ALIGN, COUNTS, Lane, Piece, Streams, Values, reading};
use super::launch::Launch;
use crate::dequant::{FloatType, Nonfinite};
use crate::encode::nvfp4::{self, BlockScale};
use crate::encode::{Deviation, fp8};

/// Bytes of a value that was decoded.
const WIDTH: u64 = 4;
/// Values that kernels load together.
const TOGETHER: u64 = 4;

/// How values are encoded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Format {
    /// E4M3, a scale per block of 128 x 128.
    Fp8 {
        /// Whether the deviation is found, which takes kernels of its own.
        measured: bool,
    },
    /// E2M1, a scale per 16 columns, and this one for all.
    Nvfp4 {
        /// The `weight_scale_2`, as the encoder of the CPU has it.
        scale_2: f32,
        /// How scales of blocks are chosen.
        how: BlockScale,
    },
}

/// Values by rows and columns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Area<'a> {
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub cols: u64,
    /// What fills it: parts do not overlap, and where none is there are zeros.
    pub parts: &'a [Part],
}

/// A piece of the input and its place in an area.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// What is made of its elements; they become `f32`, whatever is said here.
    pub values: Values,
    /// The piece.
    pub piece: Piece,
    /// The row of the area that takes its first element.
    pub row: u64,
    /// The column.
    pub col: u64,
}

impl Part {
    /// Rows and columns of the area that it takes.
    fn size(&self) -> (u64, u64) {
        if self.piece.transpose { (self.piece.cols, self.piece.rows) } else { (self.piece.rows, self.piece.cols) }
    }
}

/// Columns of an area, encoded.
#[derive(Debug)]
pub(crate) struct Encoded<'a> {
    /// Codes, in dense rows.
    pub codes: &'a [u8],
    /// Scales of blocks, in dense rows.
    pub scales: &'a [u8],
    /// How far they are from the values. Means nothing where a value is not finite, or where it was not to be found.
    pub deviation: Deviation,
    /// Values that are not finite.
    pub found: Nonfinite,
}

/// Where everything is in the memory of a lane's pieces, or of a trial. The counts that decoding adds to come first, and are not looked at:
/// encoding counts by slices.
#[derive(Debug, PartialEq)]
pub(super) struct Places {
    /// Beginning with the counts, what kernels add to.
    pub zeroed: usize,
    slices: Vec<Place>,
    /// What is copied back ends here.
    copied: usize,
    /// What is behind this are values.
    pub values: usize,
    /// Elements from one row of values to the next.
    stride: u64,
    end: usize,
}

#[derive(Debug, PartialEq)]
struct Place {
    found: usize,
    largest: Range<usize>,
    codes: Range<usize>,
    scales: Range<usize>,
    sums: Range<usize>,
}

const FOUND: u64 = (size_of::<Found>() * Encode::SLOTS) as u64;

impl Places {
    /// None if sizes are beyond all bounds, or slices begin where kernels cannot.
    pub fn new(rows: u64, cols: u64, slices: &[Range<u64>], format: Option<Format>) -> Option<Self> {
        let mut at = COUNTS as u64;
        let mut take = |bytes: Option<u64>| {
            let start = at.checked_next_multiple_of(ALIGN as u64)?;
            at = start.checked_add(bytes?)?;
            Some(usize::try_from(start).ok()?..usize::try_from(at).ok()?)
        };
        let block = fp8::BLOCK as u64;
        let whole = |slice: &Range<u64>| {
            let multiple = match format {
                Some(Format::Nvfp4 { .. }) => nvfp4::BLOCK as u64,
                Some(Format::Fp8 { .. }) | None => 1,
            };
            let width = slice.end.checked_sub(slice.start)?;
            let fits = slice.end <= cols && slice.start.is_multiple_of(TOGETHER) && width.is_multiple_of(multiple);
            fits.then_some(width)
        };
        let widths: Vec<u64> = slices.iter().map(whole).collect::<Option<_>>()?;
        let blocks = |width: u64| rows.div_ceil(block).checked_mul(width.div_ceil(block));
        let found = widths.iter().map(|_| take(Some(FOUND))).collect::<Option<Vec<_>>>()?;
        let largest = widths.iter().map(|width| take(blocks(*width)?.checked_mul(4))).collect::<Option<Vec<_>>>()?;
        let zeroed = largest.last().map_or(COUNTS, |last| last.end);
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for width in &widths {
            let elements = rows.checked_mul(*width);
            let (code, scale) = match format {
                None => (Some(0), Some(0)),
                Some(Format::Fp8 { .. }) => (elements, blocks(*width)?.checked_mul(4)),
                Some(Format::Nvfp4 { .. }) => (elements.map(|n| n / 2), elements.map(|n| n / nvfp4::BLOCK as u64)),
            };
            codes.push(take(code)?);
            scales.push(take(scale)?);
        }
        let copied = scales.last().map_or(zeroed, |last| last.end);
        let mut sums = Vec::new();
        for width in &widths {
            sums.push(take(match format {
                Some(Format::Fp8 { measured: true }) => blocks(*width)?.checked_mul(Encode::SUMS * 8),
                Some(Format::Fp8 { measured: false } | Format::Nvfp4 { .. }) | None => Some(0),
            })?);
        }
        let stride = cols.checked_next_multiple_of(TOGETHER)?;
        let values = take(rows.checked_mul(stride)?.checked_mul(WIDTH))?;
        let ranges = found.into_iter().zip(largest).zip(codes).zip(scales).zip(sums);
        let slices = ranges
            .map(|((((found, largest), codes), scales), sums)| Place {
                found: found.start,
                largest,
                codes,
                scales,
                sums,
            })
            .collect();
        Some(Places { zeroed, slices, copied, values: values.start, stride, end: values.end })
    }

    /// The places of a slice in some memory. The values, and how many there are, are for the caller to say.
    pub fn encode(&self, memory: &Memory, slice: usize) -> Encode {
        let Place { found, largest, codes, scales, sums } = &self.slices[slice];
        let at = |range: &Range<usize>| memory.at(range.start, range.len());
        Encode {
            stride: self.stride,
            codes: at(codes),
            scales: at(scales),
            largest: at(largest),
            sums: at(sums),
            found: memory.at(*found, FOUND as usize),
            ..Encode::default()
        }
    }
}

impl Lane {
    /// Bytes of a tile that each slice of an area takes whatever its size.
    pub const SLICE: usize = FOUND as usize + 8 * ALIGN;

    /// Whether a lane whose tiles have so many bytes can encode slices of an area.
    pub fn encodes(tile: usize, rows: u64, cols: u64, slices: &[Range<u64>], format: Format) -> bool {
        Places::new(rows, cols, slices, Some(format)).is_some_and(|places| places.end <= tile)
    }

    /// Decodes an area and encodes slices of its columns, each as a weight of its own. `send` bytes of the input go to the
    /// device before.
    pub fn encode(
        &mut self,
        send: usize,
        area: Area<'_>,
        slices: &[Range<u64>],
        format: Format,
    ) -> Result<Vec<Encoded<'_>>, DriverError> {
        let places = self.on_device(send, area, slices, Some(format))?;
        let bytes = self.output.bytes();
        let encoded = |place: &Place| {
            let (deviation, found) = found(&bytes[place.found..]).end();
            Encoded { codes: &bytes[place.codes.clone()], scales: &bytes[place.scales.clone()], deviation, found }
        };
        Ok(places.slices.iter().map(encoded).collect())
    }

    /// Decodes an area and finds its largest magnitude, which is not finite if a value is not.
    pub fn largest(&mut self, send: usize, area: Area<'_>) -> Result<f32, DriverError> {
        let all = 0..area.cols;
        let places = self.on_device(send, area, slice::from_ref(&all), None)?;
        let bits = places.slices.first().and_then(|place| self.output.bytes()[place.largest.clone()].first_chunk());
        Ok(bits.map_or(0.0, |bits| f32::from_bits(u32::from_le_bytes(*bits))))
    }

    /// Has the device do it, and waits.
    fn on_device(
        &mut self,
        send: usize,
        area: Area<'_>,
        slices: &[Range<u64>],
        format: Option<Format>,
    ) -> Result<Places, DriverError> {
        let places = Places::new(area.rows, area.cols, slices, format).filter(|p| p.end <= self.pieces.len());
        let places = places.ok_or_else(|| refused("the area is too large for the lane".to_owned()))?;
        let done = self.enqueue_area(send, area, slices, format, &places).and_then(|()| self.copied.wait());
        if let Err(error) = done {
            // Whatever was enqueued before it failed still uses the buffers.
            let _ = (self.streams.decode.wait(), self.streams.out.wait());
            return Err(error);
        }
        Ok(places)
    }

    fn enqueue_area(
        &mut self,
        send: usize,
        area: Area<'_>,
        slices: &[Range<u64>],
        format: Option<Format>,
        places: &Places,
    ) -> Result<(), DriverError> {
        let Streams { decode, out } = &*self.streams;
        self.device().enter()?;
        let values = self.pieces.at(places.values, places.end - places.values);
        // SAFETY: `on_device` waits for everything that is enqueued here before anybody uses the buffers again. Kernels read
        // what `reading` checks, and the places in `pieces`, which lie apart, have the sizes that they are given.
        unsafe {
            if send > 0 {
                decode.copy_in(&self.input, send, &self.source, 0)?;
            }
            decode.zero(&self.pieces, 0, places.zeroed)?;
            let filled: u64 = area.parts.iter().map(|part| part.piece.rows * part.piece.cols).sum();
            if filled < area.rows * area.cols {
                decode.zero(&self.pieces, places.values, places.end - places.values)?;
            }
            for part in area.parts {
                let (rows, cols) = part.size();
                assert!(part.row + rows <= area.rows && part.col + cols <= area.cols, "{part:?} is not in the area");
                let launch = Launch {
                    out: values,
                    out_start: part.row * places.stride + part.col,
                    out_stride: places.stride,
                    counts: self.pieces.at(0, COUNTS),
                    ..reading(&self.source, Values { dtype: FloatType::F32, ..part.values }, &part.piece)
                };
                decode.launch(part.values.ty, launch)?;
            }
            for (i, slice) in slices.iter().enumerate() {
                let encode = Encode {
                    values: values + slice.start * WIDTH,
                    rows: area.rows,
                    cols: slice.end - slice.start,
                    ..places.encode(&self.pieces, i)
                };
                enqueue_format(decode, encode, format)?;
            }
            self.decoded.record(decode)?;
            out.wait_for(&self.decoded)?;
            out.copy_out(&self.pieces, places.copied, &mut self.output)?;
        }
        self.copied.record(out)
    }
}

/// Launches the kernels of a format, or that of the largest magnitude.
///
/// # Safety
///
/// As for [`Stream::encode`].
pub(super) unsafe fn enqueue_format(
    stream: &Stream,
    encode: Encode,
    format: Option<Format>,
) -> Result<(), DriverError> {
    let (order, encode) = match format {
        None => (&[Encoder::Amax][..], Encode { whole: 1, ..encode }),
        Some(Format::Fp8 { measured: false }) => (&[Encoder::Amax, Encoder::Fp8][..], encode),
        Some(Format::Fp8 { measured: true }) => {
            (&[Encoder::Amax, Encoder::Fp8, Encoder::Fp8Measure, Encoder::Fp8Sum][..], encode)
        }
        Some(Format::Nvfp4 { scale_2, how: BlockScale::Amax }) => (&[Encoder::Nvfp4][..], Encode { scale_2, ..encode }),
        Some(Format::Nvfp4 { scale_2, how: BlockScale::Searched }) => {
            (&[Encoder::Nvfp4Searched][..], Encode { scale_2, ..encode })
        }
    };
    // SAFETY: the caller answers for the memory.
    order.iter().try_for_each(|encoder| unsafe { stream.encode(*encoder, encode) })
}

/// What all threads found of a slice.
fn found(bytes: &[u8]) -> Found {
    let mut all = Found::default();
    bytes.as_chunks().0.iter().take(Encode::SLOTS).for_each(|bytes| all += Found::read(bytes));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const FP8: Format = Format::Fp8 { measured: true };

    #[test]
    fn everything_has_a_place_of_its_own() {
        let slices = [0..256, 256..300];
        let places = Places::new(130, 302, &slices, Some(FP8)).unwrap();
        let [a, b] = &places.slices[..] else { panic!() };
        let found = FOUND as usize;
        assert_eq!((a.found, b.found, found), (256, 256 + found, 86 * 256));
        let mut all = vec![0..COUNTS, a.found..a.found + found, b.found..b.found + found];
        for place in [a, b] {
            all.extend([&place.largest, &place.codes, &place.scales, &place.sums].map(Range::clone));
        }
        all.push(places.values..places.end);
        all.sort_by_key(|range| range.start);
        assert!(all.windows(2).all(|pair| pair[0].end <= pair[1].start), "{all:?}");
        assert_eq!((a.largest.len(), a.codes.len(), a.scales.len(), a.sums.len()), (16, 130 * 256, 16, 4 * 256));
        assert_eq!((b.largest.len(), b.codes.len(), b.scales.len(), b.sums.len()), (8, 130 * 44, 8, 2 * 256));
        assert!(b.largest.end <= places.zeroed && places.zeroed <= a.codes.start && b.scales.end == places.copied);
        assert_eq!((places.stride, places.end - places.values), (304, 130 * 304 * 4));

        let unmeasured = Places::new(130, 302, &slices, Some(Format::Fp8 { measured: false })).unwrap();
        assert!(unmeasured.slices.iter().all(|place| place.sums.is_empty()) && unmeasured.copied == places.copied);

        let format = Format::Nvfp4 { scale_2: 1.0, how: BlockScale::Amax };
        let places = Places::new(3, 64, slice::from_ref(&(16..64)), Some(format)).unwrap();
        assert_eq!((places.slices[0].codes.len(), places.slices[0].scales.len()), (72, 9));
    }

    #[test]
    fn what_kernels_cannot_do_has_no_place() {
        let format = Format::Nvfp4 { scale_2: 1.0, how: BlockScale::Searched };
        let encodes = |tile, rows, cols, slice: Range<u64>, format| {
            Lane::encodes(tile, rows, cols, slice::from_ref(&slice), format)
        };
        let fits = |tile, slice, format| encodes(tile, 128, 256, slice, format);
        assert!(fits(1 << 20, 0..256, FP8) && fits(1 << 20, 0..32, format));
        assert!(!fits(128 * 256 * 5, 0..256, FP8));
        assert!(!fits(1 << 20, 0..24, format) && !fits(1 << 20, 2..64, FP8) && !fits(1 << 20, 0..257, FP8));
        assert!(!encodes(usize::MAX, u64::MAX, 256, 0..256, FP8));
        assert!(!encodes(usize::MAX, 1, u64::MAX, 0..256, FP8));
    }
}
