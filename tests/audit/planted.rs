//! Failures that have happened to converters and loaders, and neighbours of theirs.

use ggshard::dtype::Dtype;
use ggshard::mapping::{Cut, CutKind, Ignored};
use ggshard::plan::{ParamCut, Shape};

use super::*;

/// A test per failure: the plan, what is planted, and the names of which the message must hold one.
macro_rules! planted {
    ($($name:ident: $plan:expr, $plant:expr => [$($named:expr),+];)*) => {
        $(#[test] fn $name() { refused($plan, $plant, &[$($named),+]); })*
    };
}

const Q: &str = "layers.1.q.weight";
const KV_B: &str = "layers.0.kv_b.weight";
const GATE: &str = "layers.0.experts.1.gate.weight";
const UP: &str = "layers.0.experts.1.up.weight";
const DOWN: &str = "layers.0.experts.1.down.weight";
const GLM_KV_B: &str = "model.layers.1.self_attn.kv_b_proj.weight";
const GLM_O: &str = "model.layers.1.self_attn.o_proj.weight";

planted! {
    // Parts in the wrong place.
    gate_and_up_swapped_in_a_fused_source: toy(2), |p| exchange(p, GATE, UP) => [GATE, UP];
    gate_and_up_of_a_dense_block_swapped: glm(1), |p| exchange(
        p, "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    ) => ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"];
    k_and_v_swapped: toy(4), |p| exchange(p, "layers.0.x.k.weight", "layers.0.x.v.weight")
        => ["layers.0.x.k.weight", "layers.0.x.v.weight"];
    k_and_v_of_every_head_swapped: glm(2), |p| edit_all(p, GLM_KV_B, |pieces| {
        for pair in pieces.chunks_exact_mut(2) {
            let (row, rows) = (pair[0].row, pair[1].rows);
            pair[1].row = row;
            pair[0].row = row + rows;
        }
    }) => [GLM_KV_B];
    all_k_then_all_v_instead_of_head_by_head: toy(1), |p| edit(p, KV_B, 0, |pieces| {
        pieces.sort_by_key(|piece| match piece.origin { Origin::Source(r) => r.source, Origin::Fill(_) => 0 });
        let mut row = 0;
        for piece in pieces {
            piece.row = row;
            row += piece.rows;
        }
    }) => [KV_B];
    two_heads_swapped: toy(1), |p| edit(p, KV_B, 0, |pieces| {
        let rows: Vec<u64> = pieces.iter().map(|piece| piece.row).collect();
        for (at, from) in [(0, 2), (1, 3), (2, 0), (3, 1)] { pieces[at].row = rows[from]; }
    }) => [KV_B];
    two_heads_of_two_ranks_swapped: glm(4), |p| {
        let index = param(p, GLM_KV_B);
        let first = p.params[index].slices[0].pieces.clone();
        p.params[index].slices[0].pieces = p.params[index].slices[3].pieces.clone();
        p.params[index].slices[3].pieces = first;
    } => [GLM_KV_B];
    two_experts_swapped: glm(2), |p| exchange(
        p, "model.layers.1.mlp.experts.0.down_proj.weight", "model.layers.1.mlp.experts.1.down_proj.weight"
    ) => ["model.layers.1.mlp.experts.0.down_proj.weight", "model.layers.1.mlp.experts.1.down_proj.weight"];
    two_layers_swapped: deepseek(2), |p| exchange(
        p, "model.layers.0.self_attn.q_b_proj.weight", "model.layers.1.self_attn.q_b_proj.weight"
    ) => ["model.layers.0.self_attn.q_b_proj.weight"];
    q_and_k_of_another_projection_of_the_same_shape: toy(2), |p| edit_all(p, Q, |pieces| {
        for piece in pieces { region(piece).source -= 1; }
    }) => [Q, "blk.1.attn_q.weight", "blk.1.attn_k.weight", "layers.1.k.weight"];
    rows_of_two_parts_exchanged: toy(2), |p| edit(p, KV_B, 1, |pieces| {
        // The last row of k and the first of v.
        let (k, v) = (pieces[0], pieces[1]);
        let mut k_row = Piece { rows: 1, row: k.row + k.rows, ..k };
        region(&mut k_row).col += k.rows - 1;
        let mut v_row = Piece { rows: 1, row: v.row - 1, ..v };
        region(&mut v_row).row += 0;
        pieces[0].rows -= 1;
        pieces[1].rows -= 1;
        pieces[1].row += 1;
        region(&mut pieces[1]).row += 1;
        pieces.extend([k_row, v_row]);
    }) => [KV_B];

    // Rows and columns off.
    row_shifted_in_the_source: toy(2), |p| edit(p, "layers.0.x.v.weight", 0, |pieces| region(&mut pieces[0]).row -= 1)
        => ["layers.0.x.v.weight", "blk.0.attn_qkv.weight"];
    row_shifted_in_the_slice: toy(2), |p| edit(p, "layers.0.v.weight", 1, |pieces| pieces[0].row += 1)
        => ["layers.0.v.weight"];
    row_rotated_within_a_tensor: toy(1), |p| edit(p, "layers.0.v.weight", 0, |pieces| {
        let whole = pieces[0];
        let mut last = Piece { rows: 1, row: 0, ..whole };
        region(&mut last).row += whole.rows - 1;
        pieces[0].rows -= 1;
        pieces[0].row = 1;
        pieces.push(last);
    }) => ["layers.0.v.weight"];
    column_offset_by_one_block: glm(4), |p| edit(p, GLM_O, 1, |pieces| region(&mut pieces[0]).col += 32)
        => [GLM_O, "blk.1.attn_output.weight"];
    column_cut_of_two_ranks_exchanged: glm(2), |p| {
        for rank in 0..2 {
            edit(p, GLM_O, rank, |pieces| for piece in pieces {
                let cols = piece.cols;
                region(piece).col = cols * (1 - rank as u64);
            });
        }
    } => [GLM_O];
    row_cut_taken_as_a_column_cut: toy(2), |p| edit_all(p, "layers.0.o.weight", |pieces| {
        region(&mut pieces[0]).col = 0;
        region(&mut pieces[0]).width = 16;
    }) => ["layers.0.o.weight", "blk.0.attn_output.weight"];
    width_of_the_view_wrong: toy(1), |p| edit(p, DOWN, 0, |pieces| {
        region(&mut pieces[0]).width = 32;
    }) => [DOWN, "blk.0.ffn_down_exps.weight"];
    last_row_of_a_shard_taken_by_its_neighbour: glm(2), |p| {
        const UP: &str = "model.layers.0.mlp.up_proj.weight";
        edit(p, UP, 0, |pieces| pieces[0].rows -= 1);
        edit(p, UP, 1, |pieces| {
            pieces[0].rows += 1;
            region(&mut pieces[0]).row -= 1;
        });
        let index = param(p, UP);
        for (rank, change) in [(0, -1), (1, 1)] {
            let axes = p.params[index].slices[rank].shape.axes().to_vec();
            let rows = axes[0].checked_add_signed(change).unwrap();
            p.params[index].slices[rank].shape = Shape::new(&[rows, axes[1]]).unwrap();
        }
    } => ["model.layers.0.mlp.up_proj.weight"];
    cut_inside_a_head: toy(2), |p| {
        const V: &str = "layers.0.v.weight";
        edit(p, V, 0, |pieces| pieces[0].rows += 4);
        edit(p, V, 1, |pieces| {
            pieces[0].rows -= 4;
            region(&mut pieces[0]).row += 4;
        });
        let index = param(p, V);
        p.params[index].slices[0].shape = Shape::new(&[12, 32]).unwrap();
        p.params[index].slices[1].shape = Shape::new(&[4, 32]).unwrap();
    } => ["layers.0.v.weight"];
    bias_cut_off_by_one: toy(4), |p| edit(p, "layers.1.v.bias", 2, |pieces| region(&mut pieces[0]).row -= 1)
        => ["layers.1.v.bias", "blk.1.attn_v.bias"];
    stacked_tensor_cut_on_its_second_axis: toy(2), |p| edit(p, "layers.0.conv.weight", 1, |pieces| {
        region(&mut pieces[0]).row -= 3;
    }) => ["layers.0.conv.weight", "blk.0.conv.weight"];

    // Whole pieces gone, doubled or of another rank.
    piece_dropped: glm(2), |p| edit(p, GLM_KV_B, 1, |pieces| pieces.truncate(1)) => [GLM_KV_B];
    piece_repeated: glm(2), |p| edit(p, GLM_KV_B, 1, |pieces| pieces.push(pieces[0])) => [GLM_KV_B];
    piece_repeated_in_the_place_of_another: toy(1), |p| edit(p, KV_B, 0, |pieces| {
        let row = pieces[3].row;
        pieces[3] = Piece { row, ..pieces[1] };
    }) => [KV_B, "blk.0.attn_v_b.weight"];
    slice_without_pieces: toy(2), |p| edit(p, Q, 1, Vec::clear) => [Q];
    slice_of_the_wrong_rank: toy(4), |p| {
        let index = param(p, Q);
        p.params[index].slices[2].pieces = p.params[index].slices[1].pieces.clone();
    } => [Q, "blk.1.attn_q.weight"];
    replicated_rank_differs: glm(4), |p| edit(p, "model.layers.0.input_layernorm.weight", 3, |pieces| {
        let one = Piece { rows: 1, ..pieces[0] };
        pieces[0].row += 1;
        pieces[0].rows -= 1;
        region(&mut pieces[0]).row += 1;
        let mut one = one;
        region(&mut one).row += 1;
        pieces.push(one);
    }) => ["model.layers.0.input_layernorm.weight"];
    repeated_head_differs_between_its_copies: toy(4), |p| {
        let index = param(p, "layers.0.k.weight");
        p.params[index].slices[1].pieces = p.params[index].slices[2].pieces.clone();
    } => ["layers.0.k.weight"];
    repeated_heads_alternate_instead_of_neighbouring: toy(4), |p| {
        // Ranks hold heads 0, 1, 0, 1 where 0, 0, 1, 1 is right.
        let index = param(p, "layers.0.v.weight");
        let (first, last) = (p.params[index].slices[0].pieces.clone(), p.params[index].slices[3].pieces.clone());
        p.params[index].slices[1].pieces = last;
        p.params[index].slices[2].pieces = first;
    } => ["layers.0.v.weight"];
    replicated_copies_counted_as_a_cut: glm(2), |p| {
        let index = param(p, "model.norm.weight");
        let cut = Cut { kind: CutKind::Column, units: None, repeat: false };
        p.params[index].cut = ParamCut::Weights(cut.kind);
        p.model.weights[index].cut = cut;
    } => ["model.norm.weight"];

    // Transforms.
    transpose_lost: toy(2), |p| edit(p, KV_B, 0, |pieces| {
        let k = region(&mut pieces[0]);
        (k.transpose, k.width, k.row, k.col) = (false, 32, 0, 0);
    }) => [KV_B, "blk.0.attn_k_b.weight"];
    transpose_lost_on_every_rank: glm(2), |p| edit_all(p, GLM_KV_B, |pieces| {
        for piece in pieces {
            let (rows, cols) = (piece.rows, piece.cols);
            let r = region(piece);
            if r.transpose {
                let first = r.row * r.width + r.col;
                (r.transpose, r.width) = (false, cols);
                (r.row, r.col) = (first / cols, 0);
                assert_eq!((first % cols, rows > 0), (0, true));
            }
        }
    }) => [GLM_KV_B];
    transpose_of_square_matrices_added: toy(1), |p| edit(p, "layers.0.x.q.weight", 0, |pieces| {
        region(&mut pieces[0]).transpose = true;
    }) => ["layers.0.x.q.weight"];
    unpermute_lost: toy(2), |p| edit_all(p, Q, |pieces| {
        let first = pieces[0];
        let rows = pieces.iter().map(|piece| piece.rows).sum();
        *pieces = vec![Piece { rows, ..first }];
        region(&mut pieces[0]).step = 1;
    }) => [Q];
    unpermute_lost_in_one_head: toy(1), |p| edit(p, Q, 0, |pieces| {
        // The first and the last row of a head are where they were: corners alone do not see it.
        let half = pieces.remove(3).rows;
        pieces[2].rows += half;
        region(&mut pieces[2]).step = 1;
    }) => [Q];
    unpermute_of_a_bias_lost: toy(4), |p| edit_all(p, "layers.0.q.bias", |pieces| {
        let half = pieces.remove(1).rows;
        pieces[0].rows += half;
        region(&mut pieces[0]).step = 1;
    }) => ["layers.0.q.bias"];
    unpermute_turned_the_other_way: toy(1), |p| edit(p, Q, 0, |pieces| {
        // Pieces of two rows a half apart instead of half a head of rows two apart.
        let first = pieces[0];
        let mut head = Vec::new();
        for i in 0..4 {
            let mut pair = Piece { row: first.row + 2 * i, rows: 2, ..first };
            region(&mut pair).row += i;
            region(&mut pair).step = 4;
            head.push(pair);
        }
        pieces.splice(0..2, head);
    }) => [Q];
    even_and_odd_rows_swapped: toy(2), |p| edit(p, "layers.0.k.weight", 0, |pieces| {
        region(&mut pieces[0]).row += 1;
        region(&mut pieces[1]).row -= 1;
    }) => ["layers.0.k.weight"];
    constant_not_added: toy(2), |p| edit_all(p, "layers.0.norm.weight", |pieces| {
        region(&mut pieces[0]).op.add = None;
    }) => ["layers.0.norm.weight"];
    constant_of_the_other_sign: toy(2), |p| edit_all(p, "layers.0.norm.weight", |pieces| {
        region(&mut pieces[0]).op.add = Some(1.0);
    }) => ["layers.0.norm.weight"];
    constant_added_on_one_rank_too_many: toy(2), |p| edit(p, "layers.0.router.weight", 1, |pieces| {
        region(&mut pieces[0]).op.add = Some(0.0);
    }) => ["layers.0.router.weight"];
    scale_lost: toy(2), |p| edit_all(p, DOWN, |pieces| {
        region(&mut pieces[0]).op.scale = None;
    }) => [DOWN];
    scale_of_another_expert: toy(2), |p| edit_all(p, GATE, |pieces| {
        let op = &mut region(&mut pieces[0]).op;
        op.scale = op.scale.map(|(source, element)| (source, element + 1));
    }) => [GATE];
    scale_of_another_layer: toy(2), |p| {
        let other = source(p, "blk.1.ffn_gate_up_exps.scale");
        edit_all(p, GATE, |pieces| {
            let op = &mut region(&mut pieces[0]).op;
            op.scale = op.scale.map(|(_, element)| (other, element));
        });
    } => [GATE];
    scale_that_is_no_scale: toy(2), |p| {
        let other = source(p, "blk.0.attn_norm.weight");
        edit_all(p, GATE, |pieces| region(&mut pieces[0]).op.scale = Some((other, 1)));
    } => [GATE, "blk.0.attn_norm.weight"];
    scale_beyond_its_tensor: toy(2), |p| edit_all(p, GATE, |pieces| {
        let op = &mut region(&mut pieces[0]).op;
        op.scale = op.scale.map(|(source, element)| (source, element + 1000));
    }) => [GATE];

    // Padding.
    padding_replaced_by_real_rows: toy(4), |p| {
        let rows = p.pieces_of(&p.params[param(p, "head.weight")].slices[0]).to_vec();
        edit(p, "head.weight", 3, |pieces| {
            let Piece { row, rows: padding, .. } = pieces[1];
            pieces[1] = Piece { row, rows: padding, ..rows[0] };
        });
    } => ["head.weight", "output.weight"];
    padding_in_front_of_the_rows: toy(4), |p| edit(p, "embed.weight", 3, |pieces| {
        pieces[1].row = 0;
        pieces[0].row = pieces[1].rows;
    }) => ["embed.weight"];
    padding_per_rank_instead_of_at_the_end: toy(4), |p| {
        // 25 rows and 7 of padding on every rank.
        for rank in 0..4 {
            edit(p, "embed.weight", rank, |pieces| {
                let mut rows = Piece { row: 0, rows: 25, ..pieces[0] };
                region(&mut rows).row = 25 * rank as u64;
                *pieces = vec![rows, Piece { row: 25, rows: 7, origin: Origin::Fill(0.0), ..rows }];
            });
        }
    } => ["embed.weight"];
    padding_is_not_zero: toy(4), |p| edit(p, "head.weight", 3, |pieces| pieces[1].origin = Origin::Fill(1.0))
        => ["head.weight"];
    padding_is_negative_zero: toy(4), |p| edit(p, "head.weight", 3, |pieces| pieces[1].origin = Origin::Fill(-0.0))
        => ["head.weight"];
    real_rows_replaced_by_zeros: glm(2), |p| edit(p, "lm_head.weight", 1, |pieces| {
        pieces[0].origin = Origin::Fill(0.0);
    }) => ["lm_head.weight", "output.weight"];

    // Shapes, dtypes, names.
    shape_transposed: glm(1), |p| {
        let index = param(p, GLM_KV_B);
        let axes = p.params[index].slices[0].shape.axes().to_vec();
        p.params[index].slices[0].shape = Shape::new(&[axes[1], axes[0]]).unwrap();
    } => [GLM_KV_B];
    shape_of_one_rank_larger: toy(2), |p| {
        let index = param(p, "layers.0.o.weight");
        p.params[index].slices[1].shape = Shape::new(&[32, 24]).unwrap();
    } => ["layers.0.o.weight"];
    axes_merged: toy(2), |p| {
        let index = param(p, "layers.0.conv.weight");
        for slice in &mut p.params[index].slices { slice.shape = Shape::new(&[6, 8]).unwrap(); }
    } => ["layers.0.conv.weight"];
    dtype_of_the_same_width: glm(2), |p| {
        let index = param(p, GLM_O);
        p.params[index].dtype = Dtype::F16;
    } => [GLM_O];
    pinned_dtype_lost: glm(1), |p| {
        let index = p.params.iter().position(|q| q.name.ends_with("e_score_correction_bias")).unwrap();
        p.params[index].dtype = Dtype::BF16;
    } => ["e_score_correction_bias"];
    parameter_missing: glm(2), |p| {
        let index = param(p, GLM_O) as u32;
        p.params.remove(index as usize);
        for file in &mut p.files {
            file.params.retain(|q| *q != index);
            for q in &mut file.params { *q -= u32::from(*q > index); }
        }
    } => [GLM_O];
    parameter_twice: glm(2), |p| {
        let twice = p.params[param(p, GLM_O)].clone();
        p.params.push(twice);
    } => [GLM_O];
    parameter_renamed: glm(2), |p| {
        let index = param(p, GLM_O);
        p.params[index].name = "model.layers.1.self_attn.dense.weight".into();
    } => [GLM_O, "model.layers.1.self_attn.dense.weight"];
    names_of_two_parameters_exchanged: glm(2), |p| {
        let (a, b) = (param(p, "model.layers.0.self_attn.q_a_layernorm.weight"), param(p, "model.layers.0.self_attn.kv_a_layernorm.weight"));
        let name = p.params[a].name.clone();
        p.params[a].name = std::mem::replace(&mut p.params[b].name, name);
    } => ["_layernorm.weight"];
    two_rounds_of_a_loop_give_one_name: toy(1), |p| {
        let (a, b) = (param(p, GATE), param(p, "layers.0.experts.2.gate.weight"));
        p.params[b].name = p.params[a].name.clone();
        p.model.weights[b].name = p.params[a].name.clone();
    } => [GATE];
    rank_without_a_slice: toy(2), |p| {
        let index = param(p, Q);
        p.params[index].slices.pop();
    } => [Q];

    // Sources.
    source_ignored_and_used: glm(1), |p| {
        let source = source(p, "blk.0.attn_q_a.weight");
        p.model.ignored.push(Ignored { source, reason: "by mistake".into() });
    } => ["blk.0.attn_q_a.weight"];
    source_neither_ignored_nor_used: toy(1), |p| p.model.ignored.clear() => ["rope_freqs.weight", "input_scale"];
    source_cut_short: toy(1), |p| {
        let source = source(p, "blk.0.attn_v.weight") as usize;
        p.sources[source].elements -= 32;
        p.sources[source].bytes -= 34;
    } => ["blk.0.attn_v.weight", "layers.0.v.weight"];
    source_longer_than_its_rule: toy(1), |p| {
        let source = source(p, "blk.0.attn_v.weight") as usize;
        p.sources[source].elements += 32;
        p.sources[source].bytes += 34;
    } => ["blk.0.attn_v.weight"];
    source_of_another_type: toy(1), |p| {
        let source = source(p, "blk.0.attn_v.weight") as usize;
        p.sources[source].ty = ggshard::gguf::GgmlType::Q4_0;
    } => ["blk.0.attn_v.weight"];

    // Files.
    offset_off_by_one: glm(2), |p| {
        let index = param(p, GLM_O);
        p.params[index].slices[1].offset += 1;
    } => [GLM_O];
    two_slices_overlap_in_a_file: toy(2), |p| {
        let (a, b) = (param(p, Q), param(p, KV_B));
        p.params[a].slices[0].offset = p.params[b].slices[0].offset;
    } => [Q, KV_B];
    two_slices_exchanged_in_a_file: toy(2), |p| {
        let (a, b) = (param(p, GATE), param(p, UP));
        let offset = p.params[a].slices[1].offset;
        p.params[a].slices[1].offset = std::mem::replace(&mut p.params[b].slices[1].offset, offset);
    } => [GATE, UP];
    wide_dtype_behind_an_odd_number_of_narrow_ones: toy(1), |p| {
        // The F32 router last instead of first, behind three BF16 values.
        p.files[0].params.rotate_left(1);
        let mut offset = 0;
        for index in p.files[0].params.clone() {
            let param = &mut p.params[index as usize];
            param.slices[0].offset = offset + u64::from(param.dtype == Dtype::F32) * 2;
            offset += param.slices[0].shape.elements() * param.dtype.bytes();
        }
    } => ["router.weight"];
    slice_in_the_file_of_another_part: toy_in_parts(2), |p| {
        let index = param(p, Q);
        p.params[index].slices[0].file -= 1;
    } => [Q];
    slice_in_two_files: toy_in_parts(2), |p| {
        let twice = p.files[1].params[0];
        p.files[0].params.push(twice);
    } => ["layers.0"];
    slice_in_no_file: toy_in_parts(2), |p| p.files[2].params.truncate(1) => ["layers.", "model-rank-0-part-2"];
    file_claims_another_rank: toy_in_parts(2), |p| p.files[0].rank = 1 => ["model-rank-", "embed.weight"];
    file_claims_a_rank_that_does_not_exist: toy(2), |p| p.files[0].rank = 2 => ["model-rank-0-part-0"];
    file_name_twice: toy(2), |p| p.files[1].name = p.files[0].name.clone() => ["model-rank-0-part-0"];
    file_names_of_two_ranks_exchanged: toy(2), |p| {
        let name = p.files[0].name.clone();
        p.files[0].name = std::mem::replace(&mut p.files[1].name, name);
    } => ["model-rank-1-part-0"];
    file_of_a_part_missing: toy_in_parts(2), |p| drop(p.files.pop()) => ["layers.", "head.weight"];
    file_size_wrong: toy(2), |p| p.files[1].data_bytes += 4096 => ["model-rank-1-part-0"];
    rank_missing: glm(4), |p| p.tp = 2 => ["embed_tokens"];
}

#[test]
fn every_fixture_passes_at_every_tp() {
    for tp in [1, 2, 4] {
        for plan in [toy(tp), toy_in_parts(tp), glm(tp), deepseek(tp)] {
            let report = audit(&plan).unwrap();
            assert!(report.positions >= 4 * plan.params.len() as u64);
        }
    }
}
