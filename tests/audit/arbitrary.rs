//! Random changes of any field: the audit never panics, and what it accepts has the same bytes.

use std::sync::LazyLock;

use ggshard::dequant::FloatType;
use ggshard::dtype::Dtype;
use ggshard::gguf::GgmlType;
use ggshard::mapping::Content;
use ggshard::plan::Shape;
use proptest::prelude::*;

use super::*;

static PLANS: LazyLock<Vec<(Plan, Vec<String>)>> = LazyLock::new(|| {
    let plans = [toy(1), toy(2), toy(4), toy_in_parts(2)];
    plans.into_iter().map(|plan| (plan.clone(), meaning(&plan))).collect()
});

/// Everything about a plan that decides bytes or where they are: for each file its name, and for each of its slices,
/// place, name, dtype, shape and the origin of every element.
fn meaning(plan: &Plan) -> Vec<String> {
    let mut lines = Vec::new();
    for (index, file) in plan.files.iter().enumerate() {
        lines.push(format!("{} {}", file.name, file.data_bytes));
        for p in &file.params {
            let param = &plan.params[*p as usize];
            let slice = &param.slices[file.rank as usize];
            let Some(width) = slice.shape.axes().last().filter(|_| slice.shape.axes().len() > 1).or(Some(&1)) else {
                continue;
            };
            let mut origins = vec![String::new(); slice.shape.elements() as usize];
            for piece in plan.pieces_of(slice) {
                for (i, j) in (0..piece.rows).flat_map(|i| (0..piece.cols).map(move |j| (i, j))) {
                    origins[((piece.row + i) * width + piece.col + j) as usize] += &match piece.origin {
                        Origin::Fill(value) => format!("fill {}", value.to_bits()),
                        Origin::Source(r) => {
                            let add = r.op.add.map(f32::to_bits);
                            format!("{} {} {:?} {add:?}", r.source, r.element(i, j), r.op.scale)
                        }
                    };
                }
            }
            let mut hasher = blake3::Hasher::new();
            for origin in &origins {
                hasher.update(origin.as_bytes());
                hasher.update(b"\n");
            }
            let digest = hasher.finalize();
            lines.push(format!(
                "{index} {} {} {} {:?} {} {digest}",
                slice.file, slice.offset, param.name, slice.shape, param.dtype
            ));
        }
    }
    lines.push(format!("{:?}", plan.sources));
    lines
}

/// A number near another, or far from it.
fn change(value: u64, how: u64, random: u64) -> u64 {
    match how % 10 {
        0 => value.wrapping_add(1),
        1 => value.wrapping_sub(1),
        2 => 0,
        3 => value.wrapping_mul(2),
        4 => value / 2,
        5 => u64::MAX,
        6 => random % 64,
        7 => value ^ (1 << (random % 64)),
        8 => value.wrapping_add(random % 64),
        _ => random,
    }
}

/// Changes one field of one thing. Which, and how, follows from the numbers.
fn mutate(plan: &mut Plan, [what, which, how, random]: [u64; 4]) {
    let pick = |len: usize| (which % len.max(1) as u64) as usize;
    let small = |value: u32| change(value.into(), how, random) as u32;
    if what % 3 > 0 {
        let count = plan.pieces.len();
        let other = plan.pieces[(random % count as u64) as usize];
        let piece = &mut plan.pieces[pick(count)];
        match (what / 3 % 14, &mut piece.origin) {
            (0, _) => piece.row = change(piece.row, how, random),
            (1, _) => piece.col = change(piece.col, how, random),
            (2, _) => piece.rows = change(piece.rows, how, random),
            (3, _) => piece.cols = change(piece.cols, how, random),
            (4, Origin::Source(r)) => r.row = change(r.row, how, random),
            (5, Origin::Source(r)) => r.col = change(r.col, how, random),
            (6, Origin::Source(r)) => r.step = change(r.step, how, random),
            (7, Origin::Source(r)) => r.width = change(r.width, how, random),
            (8, Origin::Source(r)) => r.source = small(r.source),
            (9, Origin::Source(r)) => r.transpose = !r.transpose,
            (10, Origin::Source(r)) => r.op.scale = [None, Some((random as u32 % 50, how % 4))][(how % 2) as usize],
            (11, Origin::Source(r)) => r.op.add = [None, Some(-1.0), Some(-0.0), Some(f32::NAN)][(how % 4) as usize],
            (12, origin) => *origin = other.origin,
            (_, origin) => *origin = Origin::Fill(f32::from_bits(random as u32 & 0x8000_0001)),
        }
        return;
    }
    let dtypes = [Dtype::F16, Dtype::BF16, Dtype::F32, Dtype::I32];
    let (params, files, sources) = (plan.params.len(), plan.files.len(), plan.sources.len());
    match what / 3 % 15 {
        0..5 => {
            let param = &mut plan.params[pick(params)];
            let rank = random as usize % param.slices.len();
            let slice = &mut param.slices[rank];
            match what / 3 % 5 {
                0 => slice.pieces.start = small(slice.pieces.start),
                1 => slice.pieces.end = small(slice.pieces.end),
                2 => slice.file = small(slice.file),
                3 => slice.offset = change(slice.offset, how, random),
                _ => {
                    let mut axes = slice.shape.axes().to_vec();
                    let axis = random as usize % axes.len();
                    axes[axis] = change(axes[axis], how, random);
                    slice.shape = Shape::new(&axes).unwrap();
                }
            }
        }
        5 => plan.params[pick(params)].dtype = dtypes[(how % 4) as usize],
        6 => {
            let (Content::Joined(weights) | Content::Stacked { weights, .. }) = &mut plan.params[pick(params)].content
            else {
                return;
            };
            let at = random as usize % weights.len();
            weights[at] = change(weights[at].into(), how, random) as u32;
        }
        7 => plan.params.swap(pick(params), random as usize % params),
        8 => plan.files[pick(files)].rank = small(plan.files[pick(files)].rank),
        9 => plan.files[pick(files)].data_bytes = change(plan.files[pick(files)].data_bytes, how, random),
        10 => {
            let held = &mut plan.files[pick(files)].params;
            let at = random as usize % held.len().max(1);
            match how % 3 {
                0 => drop(held.remove(at)),
                1 => held.push(random as u32 % 40),
                _ => held.swap(0, at),
            }
        }
        11 => plan.files.swap(pick(files), random as usize % files),
        12 => {
            let source = &mut plan.sources[pick(sources)];
            match how % 3 {
                0 => source.elements = change(source.elements, how / 3, random),
                1 => source.bytes = change(source.bytes, how / 3, random),
                // Another type whose blocks are as large cannot be told from the plan alone; the engine compares the
                // sources with those of the set.
                _ => source.ty = [GgmlType::F32, GgmlType::I8, GgmlType::Q8_0, GgmlType::Q4_0][(how / 3 % 4) as usize],
            }
        }
        13 => plan.tp = small(plan.tp) % 2048,
        _ => plan.policy.dtype = [FloatType::F16, FloatType::F32][(how % 2) as usize],
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_the_audit_accepts_has_the_same_bytes(which in 0usize..4, seeds in prop::collection::vec(any::<[u64; 4]>(), 1..4)) {
        let (sound, meant) = &PLANS[which];
        let mut plan = sound.clone();
        for seed in seeds {
            mutate(&mut plan, seed);
        }
        match audit(&plan) {
            Ok(_) => prop_assert_eq!(&meaning(&plan), meant),
            Err(Error::Audit(_)) => {}
            Err(other) => prop_assert!(false, "{}", other),
        }
    }
}
