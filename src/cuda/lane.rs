//! Lanes: what one worker has of a device. One of the five files of this folder with `unsafe`.
//!
//! ```text
//! input (pinned) ─► source ─► kernels ─► pieces ─► output (pinned)
//!        └── decode stream ──────┘  event  └── out stream ──┘
//! ```
//!
//! The lanes of a device share its two streams, so that one lane's bytes go in and are decoded while another's come out
//! and a third's are hashed and written by its worker.

use std::ops::Range;
use std::sync::Arc;

use super::device::{Device, Event, Memory, Pinned, Stream};
use super::driver::DriverError;
use super::launch::{self, Launch};
use crate::dequant::{FloatType, Nonfinite};
use crate::gguf::GgmlType;

/// The three counts of a piece.
pub(super) const COUNTS: usize = 24;
/// Pieces begin at multiples of this.
pub(super) const ALIGN: usize = 256;
/// Beside the pieces of a tile, an output has room for the counts of so many.
const MOST_PIECES: usize = 1024;
/// A tile is not made smaller than this where memory is short.
const SMALLEST: usize = 1 << 20;

/// A rectangle of a tile, which comes back dense: row by row, or column by column if it is transposed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Piece {
    /// Where the block with the first element begins in the input.
    pub source: usize,
    /// Bytes from one row to the next.
    pub row_bytes: usize,
    /// Elements of that block before the first.
    pub skip: u64,
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub cols: u64,
    /// Whether columns become rows.
    pub transpose: bool,
}

/// What is made of the elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Values {
    /// The type that they have.
    pub ty: GgmlType,
    /// What they are multiplied by.
    pub scale: Option<f32>,
    /// What is added to them then.
    pub add: Option<f32>,
    /// The type that they get.
    pub dtype: FloatType,
}

/// The streams of a device.
pub(crate) struct Streams {
    pub(super) decode: Stream,
    pub(super) out: Stream,
}

impl Streams {
    pub fn new(device: &Arc<Device>) -> Result<Arc<Self>, DriverError> {
        Ok(Arc::new(Streams { decode: Stream::new(device)?, out: Stream::new(device)? }))
    }
}

/// Buffers for one tile, on both sides.
pub(crate) struct Lane {
    pub(super) streams: Arc<Streams>,
    pub(super) decoded: Event,
    pub(super) copied: Event,
    pub(super) input: Pinned,
    pub(super) source: Memory,
    pub(super) pieces: Memory,
    pub(super) output: Pinned,
    tile: usize,
}

impl Lane {
    /// The most pieces of one call.
    pub const MOST: usize = MOST_PIECES;

    /// A lane for tiles of so many bytes of input and of output.
    pub fn new(streams: &Arc<Streams>, tile: usize) -> Result<Self, DriverError> {
        let device = streams.decode.device();
        let out = tile + Self::overhead() as usize;
        Ok(Lane {
            decoded: Event::new(device)?,
            copied: Event::new(device)?,
            input: Pinned::new(device, tile)?,
            source: Memory::new(device, tile)?,
            pieces: Memory::new(device, out)?,
            output: Pinned::new(device, out)?,
            streams: Arc::clone(streams),
            tile,
        })
    }

    /// Pinned bytes of a lane beside those of a tile's input and output. It takes as many of the device's.
    pub const fn overhead() -> u64 {
        (MOST_PIECES * COUNTS).next_multiple_of(ALIGN) as u64
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        self.streams.decode.device()
    }

    /// Bytes of input, and of output, that a tile may have.
    pub fn tile(&self) -> usize {
        self.tile
    }

    /// What the next [`Lane::decode`] sends to the device.
    pub fn input(&mut self) -> &mut [u8] {
        self.input.bytes_mut()
    }

    /// Decodes pieces, each of which fits the output alone; gives the counts and the bytes of as many of the first as
    /// fit together. `send` bytes of the input go to the device before; what was sent by an earlier call stays there.
    pub fn decode(
        &mut self,
        values: Values,
        send: usize,
        pieces: &[Piece],
    ) -> Result<Vec<(Nonfinite, &[u8])>, DriverError> {
        let places = places(pieces, values.dtype, self.output.bytes().len());
        let done = self.enqueue(values, send, pieces, &places).and_then(|()| self.copied.wait());
        if let Err(error) = done {
            // Whatever was enqueued before it failed still uses the buffers.
            let _ = (self.streams.decode.wait(), self.streams.out.wait());
            return Err(error);
        }
        let bytes = self.output.bytes();
        Ok(places.into_iter().enumerate().map(|(i, place)| (counts(bytes, i), &bytes[place])).collect())
    }

    /// Decodes pieces into memory of the device, each to an element of it and with so many elements between one row, or
    /// column of a transposed piece, and the next. Gives their counts. There may be [`Lane::MOST`] pieces.
    pub fn decode_into(
        &mut self,
        values: Values,
        send: usize,
        pieces: &[(Piece, &Memory, u64, u64)],
    ) -> Result<Vec<Nonfinite>, DriverError> {
        let done = self.enqueue_into(values, send, pieces).and_then(|()| self.copied.wait());
        if let Err(error) = done {
            // As in `decode`.
            let _ = (self.streams.decode.wait(), self.streams.out.wait());
            return Err(error);
        }
        Ok((0..pieces.len()).map(|i| counts(self.output.bytes(), i)).collect())
    }

    fn enqueue_into(
        &mut self,
        values: Values,
        send: usize,
        pieces: &[(Piece, &Memory, u64, u64)],
    ) -> Result<(), DriverError> {
        let Streams { decode, out } = &*self.streams;
        self.device().enter()?;
        let width = values.dtype.bytes() as u64;
        // SAFETY: `decode_into` waits for everything that is enqueued here before anybody uses the buffers, or the
        // memory that the pieces go to, again; ranges are checked by `reading` and `at`.
        unsafe {
            if send > 0 {
                decode.copy_in(&self.input, send, &self.source, 0)?;
            }
            decode.zero(&self.pieces, 0, pieces.len() * COUNTS)?;
            for (i, (piece, memory, start, stride)) in pieces.iter().enumerate() {
                let (rows, cols) = if piece.transpose { (piece.cols, piece.rows) } else { (piece.rows, piece.cols) };
                let end = start + rows.saturating_sub(1) * stride + cols;
                memory.at(0, usize::try_from(end * width).unwrap_or(usize::MAX));
                let launch = Launch {
                    out: memory.address(),
                    out_start: *start,
                    out_stride: *stride,
                    counts: self.pieces.at(i * COUNTS, COUNTS),
                    ..reading(&self.source, values, piece)
                };
                decode.launch(values.ty, launch)?;
            }
            self.decoded.record(decode)?;
            out.wait_for(&self.decoded)?;
            out.copy_out(&self.pieces, pieces.len() * COUNTS, &mut self.output)?;
        }
        self.copied.record(out)
    }

    fn enqueue(
        &mut self,
        values: Values,
        send: usize,
        pieces: &[Piece],
        places: &[Range<usize>],
    ) -> Result<(), DriverError> {
        let Streams { decode, out } = &*self.streams;
        self.device().enter()?;
        // SAFETY: `decode` waits for everything that is enqueued here before anybody uses the buffers again; the
        // kernels read the source, of which `Piece` gives ranges that `reading` checks, and write to `pieces`.
        unsafe {
            if send > 0 {
                decode.copy_in(&self.input, send, &self.source, 0)?;
            }
            decode.zero(&self.pieces, 0, places.len() * COUNTS)?;
            for (i, (piece, place)) in pieces.iter().zip(places).enumerate() {
                let launch = Launch {
                    out: self.pieces.at(place.start, place.len()),
                    out_start: 0,
                    out_stride: if piece.transpose { piece.rows } else { piece.cols },
                    counts: self.pieces.at(i * COUNTS, COUNTS),
                    ..reading(&self.source, values, piece)
                };
                decode.launch(values.ty, launch)?;
            }
            self.decoded.record(decode)?;
            out.wait_for(&self.decoded)?;
            let end = places.last().map_or(0, |place| place.end);
            out.copy_out(&self.pieces, end, &mut self.output)?;
        }
        self.copied.record(out)
    }
}

/// The counts of a piece, which an output begins with.
fn counts(output: &[u8], piece: usize) -> Nonfinite {
    let at = |i: usize| output[piece * COUNTS + i..][..8].try_into().map_or(0, u64::from_le_bytes);
    Nonfinite { nan: at(0), inf: at(8), overflow: at(16) }
}

/// A launch that reads a piece; where it writes to is for the caller to say. A piece beyond the source is a defect.
pub(super) fn reading(source: &Memory, values: Values, piece: &Piece) -> Launch {
    let Values { ty, scale, add, dtype } = values;
    let blocks = (piece.skip + piece.cols).div_ceil(ty.block()) * ty.block_bytes();
    let bytes = piece.rows.saturating_sub(1) * piece.row_bytes as u64 + blocks;
    Launch {
        source: source.at(piece.source, usize::try_from(bytes).unwrap_or(usize::MAX)),
        out: 0,
        row_bytes: piece.row_bytes as u64,
        skip: piece.skip,
        rows: piece.rows,
        cols: piece.cols,
        out_start: 0,
        out_stride: 0,
        dtype: launch::dtype(dtype),
        transpose: u32::from(piece.transpose),
        has_scale: u32::from(scale.is_some()),
        has_add: u32::from(add.is_some()),
        scale: scale.unwrap_or(0.0),
        add: add.unwrap_or(0.0),
        counts: 0,
    }
}

/// Where the first pieces go in an output of `room` bytes, behind their counts: as many as fit.
fn places(pieces: &[Piece], dtype: FloatType, room: usize) -> Vec<Range<usize>> {
    let mut places: Vec<Range<usize>> = Vec::new();
    let mut at = (pieces.len().min(MOST_PIECES) * COUNTS).next_multiple_of(ALIGN);
    for piece in pieces.iter().take(MOST_PIECES) {
        let end = at + (piece.rows * piece.cols) as usize * dtype.bytes();
        if end > room {
            break;
        }
        places.push(at..end);
        at = end.next_multiple_of(ALIGN);
    }
    places
}

/// Lanes for tiles of `tile` bytes, `each` on every device. Where memory is short, tiles are made smaller, and then
/// lanes fewer.
pub(crate) fn lanes(devices: &[Arc<Device>], each: usize, tile: usize) -> Result<Vec<Lane>, (usize, DriverError)> {
    let (mut each, mut tile) = (each.max(1), tile);
    let streams: Vec<Arc<Streams>> = devices
        .iter()
        .enumerate()
        .map(|(i, device)| Streams::new(device).map_err(|error| (i, error)))
        .collect::<Result<_, _>>()?;
    loop {
        let place = |number: usize| {
            let device = number % streams.len();
            Lane::new(&streams[device], tile).map_err(|error| (device, error))
        };
        let all: Result<Vec<Lane>, _> = (0..each * streams.len()).map(place).collect();
        match all {
            Err((_, error)) if error.out_of_memory() && tile > SMALLEST => tile = (tile / 2).max(SMALLEST),
            Err((_, error)) if error.out_of_memory() && each > 1 => each = 1,
            Err(failure) => return Err(failure),
            Ok(lanes) => {
                tracing::info!(tile, lanes = lanes.len(), "buffers for devices");
                return Ok(lanes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_that_fit_follow_their_counts() {
        let piece = |rows, cols| Piece { source: 0, row_bytes: 0, skip: 0, rows, cols, transpose: false };
        let pieces = [piece(1, 100), piece(2, 64), piece(1, 1000)];
        assert_eq!(places(&pieces, FloatType::BF16, 4096), [256..456, 512..768, 768..2768]);
        assert_eq!(places(&pieces, FloatType::F32, 4096), [256..656, 768..1280]);
        assert!(places(&pieces[2..], FloatType::F32, 4096).is_empty());
    }
}
