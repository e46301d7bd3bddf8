//! Arrays of numbers, row-major, with the few operations that say what a converter or a rank does to a weight.

/// An array of f32.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    pub shape: Vec<usize>,
    pub data: Vec<f32>,
}

impl Array {
    pub fn new(shape: &[usize], data: Vec<f32>) -> Self {
        assert_eq!(shape.iter().product::<usize>(), data.len(), "{shape:?}");
        Array { shape: shape.to_vec(), data }
    }

    /// Elements that are numbered on from `next`: no two in a model are alike, so each says where it belongs.
    pub fn numbered(shape: &[usize], next: &mut usize) -> Self {
        let first = *next;
        *next += shape.iter().product::<usize>();
        assert!(*next < 1 << 24, "f32 counts to 2^24");
        Array::new(shape, (first..*next).map(|n| n as f32).collect())
    }

    /// Elements of one step along axis 0.
    fn row(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Steps `range` along axis 0.
    pub fn rows(&self, range: std::ops::Range<usize>) -> Self {
        let row = self.row();
        let shape: Vec<usize> = std::iter::once(range.len()).chain(self.shape[1..].iter().copied()).collect();
        Array::new(&shape, self.data[range.start * row..range.end * row].to_vec())
    }

    /// Steps `range` along the last axis.
    pub fn cols(&self, range: std::ops::Range<usize>) -> Self {
        let width = *self.shape.last().unwrap();
        let mut shape = self.shape.clone();
        *shape.last_mut().unwrap() = range.len();
        Array::new(&shape, self.data.chunks(width).flat_map(|row| row[range.clone()].to_vec()).collect())
    }

    /// One after the other along axis 0.
    pub fn join(arrays: &[Array]) -> Self {
        let mut shape = arrays[0].shape.clone();
        shape[0] = arrays.iter().map(|a| a.shape[0]).sum();
        Array::new(&shape, arrays.iter().flat_map(|a| a.data.clone()).collect())
    }

    /// Along a new axis 0.
    pub fn stack(arrays: &[Array]) -> Self {
        let shape: Vec<usize> = std::iter::once(arrays.len()).chain(arrays[0].shape.iter().copied()).collect();
        Array::new(&shape, arrays.iter().flat_map(|a| a.data.clone()).collect())
    }

    pub fn reshape(&self, shape: &[usize]) -> Self {
        Array::new(shape, self.data.clone())
    }

    /// The last two axes of three exchanged.
    pub fn swap(&self) -> Self {
        let [n, a, b] = self.shape[..] else { panic!("{:?}", self.shape) };
        let at = |i: usize, j: usize, k: usize| self.data[(i * a + j) * b + k];
        let data = (0..n).flat_map(|i| (0..b).flat_map(move |k| (0..a).map(move |j| (i, j, k))));
        Array::new(&[n, b, a], data.map(|(i, j, k)| at(i, j, k)).collect())
    }

    pub fn map(&self, f: impl Fn(f32) -> f32) -> Self {
        Array::new(&self.shape, self.data.iter().map(|x| f(*x)).collect())
    }
}
