//! A tensor as a GGUF file stores it.

use super::types::GgmlType;

/// A source tensor: name, type, shape, and where its bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceTensor {
    /// Name as stored, at most 63 bytes.
    pub name: String,
    /// Element type.
    pub ty: GgmlType,
    /// Dimensions in file order: the fastest axis first. At most four; none for a single element.
    pub ne: Vec<u64>,
    /// Index of the part that holds the data.
    pub part: usize,
    /// Byte offset of the data in that part's file.
    pub offset: u64,
    /// Bytes of data, padding not included.
    pub bytes: u64,
}

impl SourceTensor {
    /// Dimensions row-major: the slowest axis first.
    pub fn shape(&self) -> Vec<u64> {
        self.ne.iter().rev().copied().collect()
    }

    /// Number of elements.
    pub fn elements(&self) -> u64 {
        // Does not overflow: a header with more than 2^63 - 1 elements, zero-sized axes counted as one, is refused.
        self.ne.iter().product()
    }

    /// Elements of one row, the fastest axis. Quantized blocks never cross rows.
    pub fn row_elements(&self) -> u64 {
        self.ne.first().copied().unwrap_or(1)
    }

    /// Bytes of one row. Rows follow each other without padding.
    pub fn row_bytes(&self) -> u64 {
        self.row_elements() / self.ty.block() * self.ty.block_bytes()
    }

    /// Number of rows: the product of all axes but the fastest.
    pub fn rows(&self) -> u64 {
        self.ne.iter().skip(1).product()
    }
}
