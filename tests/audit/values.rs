//! Absurd values: an error, never a panic.

use ggshard::mapping::Content;
use ggshard::plan::{ParamCut, Shape};

use super::*;

/// The audit of a plan that one change made absurd.
fn absurd(change: impl FnOnce(&mut Plan)) {
    let mut plan = toy(2);
    change(&mut plan);
    let error = audit(&plan).expect_err("an absurd plan");
    assert!(matches!(error, Error::Audit(_)), "{error}");
}

#[test]
fn every_number_of_a_piece_may_be_absurd() {
    type Field = fn(&mut Piece) -> &mut u64;
    let fields: [Field; 8] = [
        |p| &mut p.row,
        |p| &mut p.col,
        |p| &mut p.rows,
        |p| &mut p.cols,
        |p| &mut region(p).row,
        |p| &mut region(p).step,
        |p| &mut region(p).col,
        |p| &mut region(p).width,
    ];
    for (i, field) in fields.into_iter().enumerate() {
        for value in [0, 1 << 31, 1 << 32, (1 << 32) + 1, 1 << 63, u64::MAX - 1, u64::MAX] {
            for name in ["layers.0.kv_b.weight", "layers.0.q.weight", "layers.0.v.bias", "layers.0.o.weight"] {
                let mut plan = toy(2);
                edit(&mut plan, name, 1, |pieces| *field(pieces.last_mut().unwrap()) = value);
                match audit(&plan) {
                    Err(error) => assert!(matches!(error, Error::Audit(_)), "{error}"),
                    // Some fields of the last piece are 0 already.
                    Ok(_) => assert_eq!(value, 0, "field {i} of '{name}'"),
                }
            }
        }
    }
}

#[test]
fn every_index_may_be_out_of_range() {
    for value in [1 << 20, u32::MAX - 1, u32::MAX] {
        absurd(|p| edit(p, "layers.0.v.weight", 0, |pieces| region(&mut pieces[0]).source = value));
        absurd(|p| edit(p, "layers.0.v.weight", 0, |pieces| region(&mut pieces[0]).op.scale = Some((value, 0))));
        absurd(|p| p.params[3].slices[0].pieces = 0..value);
        absurd(|p| p.params[3].slices[0].pieces = value..value);
        absurd(|p| p.params[3].slices[0].pieces = value..0);
        absurd(|p| p.params[3].slices[1].file = value);
        absurd(|p| p.params[3].content = Content::Joined(vec![value]));
        absurd(|p| p.files[0].params[3] = value);
        absurd(|p| p.files[0].rank = value);
        absurd(|p| p.model.ignored[0].source = value);
        absurd(|p| p.model.weights[3].recipe.parts[0].source = value);
        absurd(|p| p.tp = value);
    }
    absurd(|p| p.tp = 0);
    absurd(|p| p.params[3].slices[0].pieces = std::ops::Range { start: 5, end: 2 });
    absurd(|p| p.profile.rules.vocab.multiple = 0);
    absurd(|p| p.profile.rules.vocab.multiple = u64::MAX);
}

#[test]
fn sizes_may_overflow() {
    for value in [1 << 32, 1 << 62, u64::MAX] {
        for index in 0..toy(2).params.len() {
            for axis in 0..toy(2).params[index].shape.len() {
                absurd(|p| {
                    let mut axes = p.params[index].slices[1].shape.axes().to_vec();
                    axes[axis] = value;
                    p.params[index].slices[1].shape = Shape::new(&axes).unwrap();
                });
                absurd(|p| {
                    p.params[index].shape[axis] = value;
                    p.model.weights[index].shape[axis] = value;
                });
            }
        }
        absurd(|p| p.params[3].slices[1].offset = value);
        absurd(|p| p.files[0].data_bytes = value);
        absurd(|p| p.sources[3].elements = value);
        absurd(|p| p.sources[3].bytes = value);
        for part in 0..2 {
            let change = |change: fn(&mut ggshard::mapping::Part) -> &mut u64| {
                absurd(|p| {
                    let index = param(p, "layers.0.kv_b.weight");
                    *change(&mut p.model.weights[index].recipe.parts[part]) = value;
                });
            };
            change(|part| &mut part.start);
            change(|part| &mut part.rows);
            change(|part| &mut part.cols);
        }
        absurd(|p| p.model.weights[3].recipe.units = value);
        absurd(|p| p.model.weights[2].recipe.parts[0].unpermute = Some(value));
    }
    absurd(|p| p.model.weights[3].recipe.units = 0);
    absurd(|p| p.model.weights[3].recipe.parts[0].rows = 0);
    absurd(|p| p.model.weights[3].recipe.parts.clear());
    absurd(|p| p.model.weights[2].recipe.parts[0].unpermute = Some(0));
    absurd(|p| p.model.weights[2].recipe.parts[0].unpermute = Some(32));
    for units in [0, 3, u64::MAX] {
        absurd(|p| {
            let index = param(p, "layers.0.k.weight");
            p.model.weights[index].cut.units = Some(units);
        });
    }
}

#[test]
fn a_scalar_may_not_be_cut() {
    let mut plan = toy(2);
    let index = param(&plan, "layers.0.norm.weight");
    for cut in [ggshard::mapping::CutKind::Column, ggshard::mapping::CutKind::Row, ggshard::mapping::CutKind::Vocab] {
        plan.params[index].shape = Vec::new();
        plan.model.weights[index].shape = Vec::new();
        plan.params[index].cut = ParamCut::Weights(cut);
        plan.model.weights[index].cut.kind = cut;
        assert!(matches!(audit(&plan), Err(Error::Audit(_))));
    }
}
