//! Proof that every parameter is made of the weights that a rule of the layout gives its name, in the rule's order.

use super::fault;
use crate::error::Result;
use crate::mapping::layout::{LayoutRules, WEIGHT_BLOCK, for_class};
use crate::mapping::{Content, Pattern, PinnedDtype, Set};
use crate::plan::{Form, Param, Plan};

/// What a rule says: the parameter's name, and its content.
struct Said {
    set: Set,
    name: Pattern,
    content: Saying,
    /// The dtype that the rule pins.
    pinned: Option<PinnedDtype>,
}

enum Saying {
    /// These weights joined, or for each round of a loop variable.
    Parts(Vec<Pattern>, Option<String>),
    /// A constant, by its bits.
    Constant(u32),
}

pub(super) fn check(plan: &Plan) -> Result<()> {
    let layouts = &plan.profile.rules.layouts;
    let Some(layout) = for_class(layouts, &plan.model.class) else {
        let found = format!("the profile has no layout for class '{}'", plan.model.class);
        return Err(crate::Fault::new(found).audit());
    };
    let said = if layout.verbatim { Vec::new() } else { sayings(layouts, layout) };
    for param in plan.params.iter().filter(|p| !p.form.is_scales()) {
        let weights: Vec<&str> =
            param.content.weights().iter().map(|w| plan.model.weights[*w as usize].name.as_str()).collect();
        // Kept blocks have a name of their own, made of the parameter's.
        let name = match param.form {
            Form::Plain | Form::Encoded { .. } | Form::Scales { .. } => param.name.clone(),
            Form::Kept(_) => match param.name.strip_suffix("qweight") {
                Some(stem) if stem.ends_with(['.', '_']) && weights.iter().all(|w| w.ends_with("weight")) => {
                    format!("{stem}weight")
                }
                Some(stem) => stem.trim_end_matches('.').to_owned(),
                None => String::new(),
            },
        };
        let first = param.content.weights().first().and_then(|w| plan.model.weights[*w as usize].pinned);
        let own_name = param.pinned == first
            && param.set == Set::Main
            && matches!(param.content, Content::Joined(_))
            && weights == [name.as_str()];
        let ruled =
            if layout.verbatim { own_name } else { said.iter().any(|said| gives(said, param, &name, &weights, first)) };
        if !ruled {
            let shown: Vec<&str> = weights.iter().take(4).copied().collect();
            return Err(fault(param, 0, format!("it is made of {} weights: {}", weights.len(), shown.join(", ")))
                .expected(format!("what a rule of profile '{}' gives this name", plan.profile.rules.name))
                .audit());
        }
    }
    Ok(())
}

/// Every rule of a layout and of those that it extends. A pattern that cannot be read says nothing.
fn sayings(layouts: &[LayoutRules], layout: &LayoutRules) -> Vec<Said> {
    let mut all = Vec::new();
    let mut next = Some(layout);
    let mut hops = 0;
    let draft_block = draft_block(layouts, layout);
    while let Some(layout) = next.filter(|_| hops < 16) {
        hops += 1;
        let weight = |text: &str| Pattern::parse(&text.replace("{block}", WEIGHT_BLOCK));
        for (set, block) in [(Set::Main, WEIGHT_BLOCK), (Set::Draft, draft_block.as_str())] {
            let name = |text: &str| Pattern::parse(&text.replace("{block}", block));
            let mut say = |named: &str, parts: Vec<&str>, stack: Option<String>, pinned: Option<PinnedDtype>| {
                let parts: std::result::Result<Vec<Pattern>, String> = parts.into_iter().map(weight).collect();
                if let (Ok(name), Ok(parts)) = (name(named), parts) {
                    all.push(Said { set, name, content: Saying::Parts(parts, stack), pinned });
                }
            };
            for rule in &layout.params {
                say(&rule.name, rule.parts.iter().map(String::as_str).collect(), rule.stack.clone(), rule.dtype);
            }
            for kept in &layout.keep {
                say(kept, vec![kept.as_str()], None, None);
            }
            for rule in &layout.constants {
                let bits = rule.value.to_bits();
                let names = rule.names.iter().filter_map(|n| name(n).ok());
                let pinned = rule.pinned();
                all.extend(names.map(|name| Said { set, name, content: Saying::Constant(bits), pinned }));
            }
        }
        let tied = layout.tied.iter().map(|t| (Set::Main, &t.name, &t.of));
        let drafted =
            layout.draft.iter().flat_map(|d| &d.params).flat_map(|p| p.from.iter().map(|f| (Set::Draft, &p.name, f)));
        for (set, name, from) in tied.chain(drafted) {
            if let (Ok(name), Ok(part)) = (Pattern::parse(name), Pattern::parse(from)) {
                all.push(Said { set, name, content: Saying::Parts(vec![part], None), pinned: None });
            }
        }
        next = layout.extends.as_ref().and_then(|parent| layouts.iter().find(|l| l.name == *parent));
    }
    all
}

fn draft_block(layouts: &[LayoutRules], layout: &LayoutRules) -> String {
    let mut next = Some(layout);
    for _ in 0..16 {
        match next {
            Some(LayoutRules { draft: Some(draft), .. }) => return draft.block.clone(),
            Some(LayoutRules { extends: Some(parent), .. }) => next = layouts.iter().find(|l| l.name == *parent),
            Some(_) | None => break,
        }
    }
    WEIGHT_BLOCK.to_owned()
}

/// Whether a rule gives this parameter exactly these weights.
fn gives(said: &Said, param: &Param, name: &str, weights: &[&str], first: Option<PinnedDtype>) -> bool {
    if said.set != param.set || param.pinned != said.pinned.or(first) {
        return false;
    }
    let Some(vars) = said.name.capture(name) else { return false };
    let (parts, stack) = match (&said.content, &param.content) {
        (Saying::Constant(bits), Content::Constant(value)) => return *bits == value.to_bits(),
        (Saying::Parts(parts, None), Content::Joined(_)) => (parts, None),
        (Saying::Parts(parts, Some(stack)), Content::Stacked { .. }) => (parts, Some(stack)),
        (
            Saying::Constant(_) | Saying::Parts(..),
            Content::Constant(_) | Content::Joined(_) | Content::Stacked { .. },
        ) => {
            return false;
        }
    };
    let whole = if stack.is_some() { weights.len().is_multiple_of(parts.len()) } else { weights.len() == parts.len() };
    whole
        && weights.iter().enumerate().all(|(i, weight)| {
            let Some(mut found) = parts[i % parts.len()].capture(weight) else { return false };
            let round = (i / parts.len()) as u64;
            let in_order = stack.is_none_or(|stack| found.iter().all(|(n, v)| n != stack || *v == round));
            // A draft model's parameter without a block number takes that of any MTP block.
            found.retain(|(n, _)| stack.is_none_or(|s| n != s) && vars.iter().any(|(v, _)| v == n));
            in_order && found.iter().all(|var| vars.contains(var))
        })
}
