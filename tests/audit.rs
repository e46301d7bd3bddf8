//! The audit against plans with planted failures: each test is named after the failure that it plants, and asks that the
//! sound plan passes and the audit refuses the other with the name of what is wrong.

#[path = "common/gguf_writer.rs"]
mod gguf_writer;
#[path = "common/plans.rs"]
mod plans;
#[path = "common/toy.rs"]
mod toy;
#[path = "common/truth.rs"]
mod truth;

#[path = "audit/arbitrary.rs"]
mod arbitrary;
#[path = "audit/forms.rs"]
mod forms;
#[path = "audit/planted.rs"]
mod planted;
#[path = "audit/values.rs"]
mod values;

use ggshard::error::Error;
use ggshard::plan::audit::audit;
use ggshard::plan::{Origin, Piece, Plan, Region};
use plans::{DEEPSEEK, GLM};

fn toy(tp: u32) -> Plan {
    plans::plan(&toy::set(), &toy::mapping(), tp, plans::policy())
}

/// The toy in several parts per rank.
fn toy_in_parts(tp: u32) -> Plan {
    let policy = ggshard::plan::Policy { part_size: 8 << 10, ..plans::policy() };
    plans::plan(&toy::set(), &toy::mapping(), tp, policy)
}

fn glm(tp: u32) -> Plan {
    plans::fixture_plan(GLM, tp)
}

fn deepseek(tp: u32) -> Plan {
    plans::fixture_plan(DEEPSEEK, tp)
}

/// Index of a parameter.
fn param(plan: &Plan, name: &str) -> usize {
    plan.params.iter().position(|p| p.name == name).unwrap_or_else(|| panic!("no parameter '{name}'"))
}

/// Index of a source.
fn source(plan: &Plan, name: &str) -> u32 {
    plan.sources.iter().position(|s| s.name == name).unwrap_or_else(|| panic!("no source '{name}'")) as u32
}

/// Gives one rank's slice of a parameter pieces of its own, changed.
fn edit(plan: &mut Plan, name: &str, rank: usize, change: impl FnOnce(&mut Vec<Piece>)) {
    let index = param(plan, name);
    let mut pieces = plan.pieces_of(&plan.params[index].slices[rank]).to_vec();
    change(&mut pieces);
    let start = plan.pieces.len() as u32;
    plan.pieces.extend(pieces);
    plan.params[index].slices[rank].pieces = start..plan.pieces.len() as u32;
}

/// The same on every rank.
fn edit_all(plan: &mut Plan, name: &str, change: impl Fn(&mut Vec<Piece>)) {
    for rank in 0..plan.tp as usize {
        edit(plan, name, rank, &change);
    }
}

fn region(piece: &mut Piece) -> &mut Region {
    match &mut piece.origin {
        Origin::Source(region) => region,
        Origin::Fill(_) => panic!("a piece of padding"),
    }
}

/// Two parameters exchange their pieces on every rank.
fn exchange(plan: &mut Plan, a: &str, b: &str) {
    let (a, b) = (param(plan, a), param(plan, b));
    for rank in 0..plan.tp as usize {
        let pieces = plan.params[a].slices[rank].pieces.clone();
        plan.params[a].slices[rank].pieces = std::mem::replace(&mut plan.params[b].slices[rank].pieces, pieces);
    }
}

/// Asks for all that a planted failure must show.
fn refused(plan: Plan, plant: impl FnOnce(&mut Plan), named: &[&str]) {
    let report = audit(&plan).expect("the sound plan passes");
    assert_eq!(report.slices, plan.params.len() as u64 * u64::from(plan.tp));
    assert_eq!(report.sources, plan.sources.len() as u64);
    let mut wrong = plan.clone();
    plant(&mut wrong);
    assert_ne!(format!("{wrong:?}"), format!("{plan:?}"), "nothing was planted");
    match audit(&wrong) {
        Ok(_) => panic!("the audit accepted it"),
        Err(error @ Error::Audit(_)) => {
            let message = error.to_string();
            assert!(named.iter().any(|name| message.contains(name)), "'{message}' names none of {named:?}");
        }
        Err(other) => panic!("another error: {other}"),
    }
}
