//! A picture of a plan: one HTML page that shows blocks against parameters, what each rank holds and what that costs.
//!
//! [`Plan::picture`] gathers plain data; [`Picture::to_html`] puts it into the page, which draws it with its own few
//! lines of script. The page asks the network for nothing, and the same plan gives the same page, byte for byte.
//! Names come from files that nobody vouches for: they are data in the page, never markup.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::Serialize;

use super::{DRAFT_FOLDER, Param, Plan, Summary};
use crate::mapping::{Content, Set};

/// The page, with one place for the data.
const PAGE: &str = include_str!("picture.html");
/// Where the data goes.
const DATA: &str = "@PLAN@";
/// Most sources that a group of parameters names.
const MOST_SOURCES: usize = 8;

/// What the page shows.
#[derive(Debug, Clone, Serialize)]
pub struct Picture {
    /// The program and its version.
    pub tool: String,
    /// What the model calls itself.
    pub name: String,
    /// What becomes of MTP blocks.
    pub mtp: &'static str,
    /// Size in bytes at which a part is closed.
    pub part_size: u64,
    /// Each rank's rows of an expert are padded to a multiple of this.
    pub moe_pad: Option<u64>,
    /// The plan in numbers; without parameters, which the sections hold.
    pub summary: Summary,
    /// For each of the summary's ranks, bytes by cut.
    pub by_cut: Vec<BTreeMap<&'static str, u64>>,
    /// The sets of files: the model, and the draft model if it has one.
    pub sections: Vec<Section>,
}

/// One set of files: blocks against parameters.
#[derive(Debug, Clone, Serialize)]
pub struct Section {
    /// `main`, or `mtp` for the draft model.
    pub set: &'static str,
    /// The kinds of parameters that blocks have, in the order of the model, modules kept together.
    pub columns: Vec<Column>,
    /// Blocks, and parameters outside of blocks, in the order of the model.
    pub rows: Vec<Row>,
}

/// A kind of parameter: the name without the numbers of block and expert.
///
/// The full name is the row's `prefix` and `number`, then `head`, then for experts the number and `tail`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub struct Column {
    /// The name between the numbers of block and expert, or all that follows the block's.
    pub head: String,
    /// The name after the expert's number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tail: Option<String>,
    /// The module that it belongs to; several columns share one heading.
    pub group: String,
    /// What the heading of the column says.
    pub label: String,
}

/// A block, or a parameter outside of blocks.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// The name up to the block's number, or the whole name.
    pub prefix: String,
    /// The block's number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub number: Option<u64>,
    /// It is a multi-token-prediction block.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub mtp: bool,
    /// The pipeline stage that holds it.
    pub stage: u32,
    /// Its parameters.
    pub cells: Vec<Cell>,
}

/// The parameters of one kind in one block: one, or one for each expert.
#[derive(Debug, Clone, Serialize)]
pub struct Cell {
    /// The kind, an index of the section's columns; absent outside of blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub column: Option<u32>,
    /// Parameters that agree in everything but the expert; nearly always one group.
    pub groups: Vec<Group>,
}

/// Parameters that differ only in the expert's number.
#[derive(Debug, Clone, Serialize)]
pub struct Group {
    /// How many there are.
    pub count: u64,
    /// First and last expert of each run; empty if it is no expert's parameter.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub experts: Vec<(u64, u64)>,
    /// The cut; `constant` for a scalar that the layout asks for.
    pub cut: &'static str,
    /// The element type.
    pub dtype: &'static str,
    /// The whole shape of each, row-major.
    pub shape: Vec<u64>,
    /// The shape that each rank holds of each: one that holds for all ranks, or one per rank.
    pub held: Vec<Vec<u64>>,
    /// Bytes that each rank holds of all of them together: one number for all ranks, or one per rank.
    pub bytes: Vec<u64>,
    /// The value of a constant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Elements of the stack, for experts in one parameter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stacked: Option<u64>,
    /// The weights that are joined in it, in order, with their rows; empty for a weight under its own name. Of a stack,
    /// those of the first element; of a group, those of the first parameter.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<(String, u64)>,
    /// Source tensors and their types, the first few.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<(String, &'static str)>,
    /// Source tensors beyond those.
    #[serde(skip_serializing_if = "is_zero")]
    pub more_sources: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl Plan {
    /// Gathers what the page shows. `name` is what the model calls itself (`general.name`), `chosen` why its mapping
    /// was chosen.
    pub fn picture(&self, name: &str, chosen: &str) -> Picture {
        let summary = self.summary(chosen, false);
        let mut by_cut = vec![BTreeMap::new(); summary.ranks.len()];
        let rank_of: HashMap<(&str, u32, u32), usize> =
            summary.ranks.iter().enumerate().map(|(i, r)| ((r.set, r.stage, r.rank), i)).collect();
        for param in &self.params {
            for (rank, slice) in param.slices.iter().enumerate() {
                let Some(at) = rank_of.get(&(set_name(param.set), param.stage, rank as u32)) else { continue };
                *by_cut[*at].entry(cut(param)).or_default() += self.slice_bytes(param, slice);
            }
        }
        let sections = [Set::Main, Set::Draft].into_iter().filter_map(|set| self.section(set)).collect();
        Picture {
            tool: format!("ggshard {}", env!("CARGO_PKG_VERSION")),
            name: name.to_owned(),
            mtp: self.policy.mtp.name(),
            part_size: self.policy.part_size,
            moe_pad: self.policy.moe_pad,
            summary,
            by_cut,
            sections,
        }
    }

    fn section(&self, set: Set) -> Option<Section> {
        let mut drawing = Drawing::default();
        for index in (0..self.params.len()).filter(|i| self.params[*i].set == set) {
            drawing.add(self, index);
        }
        let Drawing { columns, rows, .. } = drawing;
        (!rows.is_empty()).then(|| {
            let (columns, place) = arranged(columns, &merged(&rows));
            let mut section = Section { set: set_name(set), columns, rows };
            for cell in section.rows.iter_mut().flat_map(|r| &mut r.cells) {
                cell.column = cell.column.map(|c| place[c as usize]);
            }
            section.rows.iter_mut().for_each(|r| r.cells.sort_by_key(|c| c.column));
            section
        })
    }

    /// A parameter as a group of one.
    fn group(&self, index: usize, expert: Option<u64>) -> Group {
        let param = &self.params[index];
        let weights = param.content.weights();
        let joined = &weights[..param.content.parts().min(weights.len())];
        let part = |w: &u32| {
            let weight = &self.model.weights[*w as usize];
            (weight.name.clone(), weight.shape.first().copied().unwrap_or(1))
        };
        let mut parts: Vec<(String, u64)> = joined.iter().map(part).collect();
        if let [(name, _)] = parts.as_slice()
            && *name == param.name
        {
            parts.clear();
        }
        let (value, stacked) = match &param.content {
            Content::Joined(_) => (None, None),
            Content::Stacked { weights, parts } => (None, Some(weights.len() as u64 / u64::from((*parts).max(1)))),
            Content::Constant(value) => (Some(value.to_string()), None),
        };
        let sources = self.sources_of(index);
        Group {
            count: 1,
            experts: expert.map(|e| (e, e)).into_iter().collect(),
            cut: cut(param),
            dtype: param.dtype.name(),
            shape: param.shape.clone(),
            held: once(param.slices.iter().map(|s| s.shape.axes().to_vec()).collect()),
            bytes: once(param.slices.iter().map(|s| self.slice_bytes(param, s)).collect()),
            value,
            stacked,
            parts,
            more_sources: sources.len().saturating_sub(MOST_SOURCES) as u64,
            sources: sources.into_iter().take(MOST_SOURCES).collect(),
        }
    }
}

fn set_name(set: Set) -> &'static str {
    match set {
        Set::Main => "main",
        Set::Draft => DRAFT_FOLDER,
    }
}

fn cut(param: &Param) -> &'static str {
    match param.content {
        Content::Constant(_) => "constant",
        Content::Joined(_) | Content::Stacked { .. } => param.cut.name(),
    }
}

/// One value if all are the same.
fn once<T: PartialEq>(mut values: Vec<T>) -> Vec<T> {
    if values.windows(2).all(|w| w[0] == w[1]) {
        values.truncate(1);
    }
    values
}

impl Group {
    /// Takes another parameter in if it differs only in the expert's number.
    fn take(&mut self, other: &Group) -> bool {
        let types = |g: &Group| g.sources.iter().map(|(_, t)| *t).collect::<Vec<_>>();
        let alike = self.cut == other.cut
            && self.dtype == other.dtype
            && self.shape == other.shape
            && self.held == other.held
            && self.stacked == other.stacked
            && self.value == other.value
            && self.parts.len() == other.parts.len()
            && (self.sources == other.sources || types(other).iter().all(|t| types(self).contains(t)));
        // Without a number to tell them apart, two parameters are never one group.
        let (Some(last), Some((expert, _)), true) = (self.experts.last_mut(), other.experts.first(), alike) else {
            return false;
        };
        if expert.checked_sub(1) == Some(last.1) {
            last.1 = *expert;
        } else {
            self.experts.push((*expert, *expert));
        }
        // `other` is one parameter and `held` agrees, so both give bytes in the same form.
        self.bytes.iter_mut().zip(&other.bytes).for_each(|(sum, b)| *sum += b);
        self.count += 1;
        for source in &other.sources {
            if self.sources.contains(source) {
                continue;
            }
            if self.sources.len() < MOST_SOURCES {
                self.sources.push(source.clone());
            } else {
                self.more_sources += 1;
            }
        }
        self.more_sources += other.more_sources;
        true
    }
}

/// A section in the making. Columns are numbered as they are found.
#[derive(Default)]
struct Drawing {
    columns: Vec<(String, Option<String>)>,
    column_of: HashMap<(String, Option<String>), u32>,
    rows: Vec<Row>,
    row_of: HashMap<(String, Option<u64>), usize>,
    cell_of: HashMap<(usize, Option<u32>), usize>,
}

impl Drawing {
    fn add(&mut self, plan: &Plan, index: usize) {
        let param = &plan.params[index];
        let name = Name::of(&param.name);
        let at = *self.row_of.entry((name.prefix.to_owned(), name.block)).or_insert_with(|| {
            let prefix = name.prefix.to_owned();
            self.rows.push(Row { prefix, number: name.block, mtp: false, stage: param.stage, cells: Vec::new() });
            self.rows.len() - 1
        });
        let column = name.block.is_some().then(|| self.column(&name));
        let row = &mut self.rows[at];
        row.mtp |= name.block.is_some() && param.content.weights().iter().any(|w| plan.model.weights[*w as usize].mtp);
        let group = plan.group(index, name.expert);
        let cell = *self.cell_of.entry((at, column)).or_insert_with(|| {
            row.cells.push(Cell { column, groups: Vec::new() });
            row.cells.len() - 1
        });
        let groups = &mut row.cells[cell].groups;
        if !groups.iter_mut().any(|g| g.take(&group)) {
            groups.push(group);
        }
    }

    /// The number of a kind.
    fn column(&mut self, name: &Name<'_>) -> u32 {
        let key = (name.head.to_owned(), name.tail.map(str::to_owned));
        if let Some(known) = self.column_of.get(&key) {
            return *known;
        }
        let number = self.columns.len() as u32;
        self.columns.push(key.clone());
        self.column_of.insert(key, number);
        number
    }
}

/// A parameter's name, taken apart at the numbers of block and expert.
#[derive(Debug, PartialEq, Eq)]
struct Name<'a> {
    prefix: &'a str,
    block: Option<u64>,
    head: &'a str,
    expert: Option<u64>,
    tail: Option<&'a str>,
}

impl<'a> Name<'a> {
    /// The block's number is the first segment that is a number; the expert's is one that follows a segment `experts`.
    fn of(name: &'a str) -> Name<'a> {
        let whole = Name { prefix: name, block: None, head: "", expert: None, tail: None };
        let Some((start, end, block)) = number(name, |_| true) else { return whole };
        let rest = &name[end..];
        let named = Name { prefix: &name[..start], block: Some(block), head: rest, ..whole };
        match number(rest, |before| before.ends_with("experts.")) {
            None => named,
            Some((start, end, expert)) => {
                Name { head: &rest[..start], expert: Some(expert), tail: Some(&rest[end..]), ..named }
            }
        }
    }
}

/// The first segment that is a number in plain form, as (start, end, value), if what comes before it will do.
fn number(text: &str, before: impl Fn(&str) -> bool) -> Option<(usize, usize, u64)> {
    let mut start = 0;
    for segment in text.split('.') {
        let plain = segment.bytes().all(|b| b.is_ascii_digit()) && (segment.len() == 1 || !segment.starts_with('0'));
        if let Some(value) = segment.parse().ok().filter(|_| plain && start > 0 && before(&text[..start])) {
            return Some((start, start + segment.len(), value));
        }
        start += segment.len() + 1;
    }
    None
}

/// The order of columns that keeps the order within rows as far as rows agree. What a row has more than those above it
/// goes before the next kind that is known, so that it follows what stands there instead in other rows.
fn merged(rows: &[Row]) -> Vec<u32> {
    let mut order: Vec<u32> = Vec::new();
    let mut known: HashSet<u32> = HashSet::new();
    for row in rows {
        let kinds: Vec<u32> = row.cells.iter().filter_map(|c| c.column).collect();
        if kinds.iter().all(|k| known.contains(k)) {
            continue;
        }
        let mut place = order.len();
        for kind in kinds.iter().rev() {
            if known.contains(kind) {
                place = order.iter().position(|c| c == kind).unwrap_or(place);
            } else {
                order.insert(place, *kind);
            }
        }
        known.extend(kinds);
    }
    order
}

/// Columns in their order, those of a module together where its first one is; and the place of each column.
fn arranged(columns: Vec<(String, Option<String>)>, order: &[u32]) -> (Vec<Column>, Vec<u32>) {
    let shown = |(head, tail): &(String, Option<String>)| match tail {
        None => head.trim_start_matches('.').to_owned(),
        Some(tail) => format!("{}*{tail}", head.trim_start_matches('.')),
    };
    let texts: Vec<String> = columns.iter().map(shown).collect();
    let module = |text: &str, depth: usize| match text.match_indices('.').nth(depth - 1) {
        Some((at, _)) => text[..at].to_owned(),
        None => text.to_owned(),
    };
    let mut sizes: HashMap<String, usize> = HashMap::new();
    texts.iter().for_each(|t| *sizes.entry(module(t, 1)).or_default() += 1);
    // A module that holds nearly everything, such as a wrapper around the block, tells nothing.
    let group = |text: &str| {
        let outer = module(text, 1);
        if sizes[&outer] > 4 && sizes[&outer] * 4 > texts.len() * 3 { module(text, 2) } else { outer }
    };
    let mut groups: Vec<String> = Vec::new();
    for column in order {
        let group = group(&texts[*column as usize]);
        if !groups.contains(&group) {
            groups.push(group);
        }
    }
    let rank: HashMap<&str, usize> = groups.iter().enumerate().map(|(i, g)| (g.as_str(), i)).collect();
    let mut order = order.to_vec();
    order.sort_by_key(|c| rank[group(&texts[*c as usize]).as_str()]);
    let mut place = vec![0; columns.len()];
    order.iter().enumerate().for_each(|(at, c)| place[*c as usize] = at as u32);
    let column = |c: &u32| {
        let (text, (head, tail)) = (&texts[*c as usize], columns[*c as usize].clone());
        let group = group(text);
        let short = |t: &str| t.strip_suffix(".weight").unwrap_or(t).to_owned();
        let inner = text.strip_prefix(group.as_str()).and_then(|t| t.strip_prefix('.')).unwrap_or_default();
        // A module of one tensor needs no heading of its own.
        match inner {
            "" | "weight" => {
                let label = group.rsplit('.').next().unwrap_or_default();
                Column { head, tail, label: short(label), group: String::new() }
            }
            inner => Column { head, tail, label: short(inner), group },
        }
    };
    (order.iter().map(column).collect(), place)
}

impl Picture {
    /// The page. Nothing in the data can end the element that holds it or be taken for markup.
    pub fn to_html(&self) -> String {
        // Maps with text keys, numbers and texts: nothing that JSON cannot say.
        let json = serde_json::to_string(self).unwrap_or_default();
        let mut safe = String::with_capacity(json.len() + json.len() / 16);
        for c in json.chars() {
            match c {
                '<' => safe.push_str("\\u003c"),
                '>' => safe.push_str("\\u003e"),
                '&' => safe.push_str("\\u0026"),
                '\'' => safe.push_str("\\u0027"),
                '\u{2028}' => safe.push_str("\\u2028"),
                '\u{2029}' => safe.push_str("\\u2029"),
                c => safe.push(c),
            }
        }
        PAGE.replacen(DATA, &safe, 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_apart_at_block_and_expert() {
        let name = Name::of("model.layers.3.mlp.experts.17.up_proj.weight");
        assert_eq!((name.prefix, name.block), ("model.layers.", Some(3)));
        assert_eq!((name.head, name.expert, name.tail), (".mlp.experts.", Some(17), Some(".up_proj.weight")));
        assert_eq!(Name::of("blk.0.ssm.1.weight").head, ".ssm.1.weight");
        // What would not be put together again the same is not taken apart.
        for whole in ["lm_head.weight", "a.007.weight", "", ".", "3.weight", "a.99999999999999999999.b", "a.+3.b"] {
            assert_eq!(Name::of(whole).prefix, whole);
            assert_eq!(Name::of(whole).block, None);
        }
    }

    #[test]
    fn what_some_rows_have_more_goes_where_it_is_in_them() {
        let row = |kinds: &[u32]| {
            let cells = kinds.iter().map(|c| Cell { column: Some(*c), groups: Vec::new() }).collect();
            Row { prefix: String::new(), number: Some(0), mtp: false, stage: 0, cells }
        };
        let (dense, sparse, last) = (row(&[0, 1, 2, 3]), row(&[0, 4, 5, 3]), row(&[6, 0, 4, 5, 3, 7]));
        assert_eq!(merged(&[dense, sparse, last]), [6, 0, 1, 2, 4, 5, 3, 7]);
    }

    #[test]
    fn modules_stay_together_and_a_wrapper_is_no_module() {
        let names = ["w.norm", "w.attn.q.weight", "w.attn.k.weight", "w.mlp.up.weight", "w.attn.v.bias"];
        let columns = names.map(|n| (format!(".{n}"), None)).to_vec();
        let (columns, place) = arranged(columns, &[0, 1, 2, 3, 4]);
        let labels: Vec<(&str, &str)> = columns.iter().map(|c| (c.group.as_str(), c.label.as_str())).collect();
        let attn = "w.attn";
        assert_eq!(labels, [("", "norm"), (attn, "q"), (attn, "k"), (attn, "v.bias"), ("w.mlp", "up")]);
        assert_eq!(place, [0, 1, 2, 4, 3]);
    }
}
