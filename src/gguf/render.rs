//! A description as text for people.

use super::describe::{Description, KeyDescription};

impl Description {
    /// The summary, the parts, the type histogram and the metadata as aligned text, ending in a newline; with `tensors`
    /// the list of all tensors, too. Control characters from the file are escaped.
    pub fn render(&self, tensors: bool) -> String {
        let mut out = String::new();
        let unknown = || "(none)".to_owned();
        let mut summary = Table::new("  ll");
        let mut row = |name: &str, value: String| summary.row([name.to_owned(), value]);
        row("path", self.path.display().to_string());
        row("architecture", self.architecture.clone().unwrap_or_else(unknown));
        row("name", self.name.clone().unwrap_or_else(unknown));
        if let Some(general_type) = &self.general_type {
            row("type", general_type.clone());
        }
        if let Some(file_type) = &self.file_type {
            row("file type", format!("{} ({})", file_type.id, file_type.name.unwrap_or("unknown")));
        }
        row("parameters", format!("{} ({})", self.parameters, billions(self.parameters)));
        row("tensors", self.tensors.len().to_string());
        row("tensor data", size(self.tensor_bytes));
        row("files", format!("{}, {}", self.parts.len(), size(self.file_bytes)));
        if self.header_only {
            row("data", "not checked: opened for headers only".to_owned());
        }
        summary.write(&mut out);

        out.push_str("\nparts\n");
        let mut table = Table::new("  rlrrrrr");
        table.row(["#", "file", "bytes", "header", "version", "align", "tensors"].map(str::to_owned));
        for (i, part) in self.parts.iter().enumerate() {
            let name = part.path.file_name().unwrap_or(part.path.as_os_str()).to_string_lossy().into_owned();
            let numbers = [part.bytes, part.header_bytes, part.version.into(), part.alignment, part.tensors as u64];
            let [bytes, header, version, alignment, count] = numbers.map(|n| n.to_string());
            table.row([i.to_string(), name, bytes, header, version, alignment, count]);
        }
        table.write(&mut out);

        out.push_str("\ntypes\n");
        let mut table = Table::new("  lrrrr");
        table.row(["type", "tensors", "elements", "bytes", "share"].map(str::to_owned));
        for ty in &self.types {
            let share = if self.tensor_bytes == 0 { 0.0 } else { ty.bytes as f64 / self.tensor_bytes as f64 * 100.0 };
            let numbers = [ty.tensors.to_string(), ty.elements.to_string(), ty.bytes.to_string()];
            let [count, elements, bytes] = numbers;
            table.row([ty.ty.to_owned(), count, elements, bytes, format!("{share:.1} %")]);
        }
        table.write(&mut out);

        out.push_str("\nmetadata\n");
        let mut table = Table::new("  lll");
        table.row(["key", "type", "value"].map(str::to_owned));
        for key in &self.metadata {
            table.row([key.key.clone(), type_of(key), value_of(key)]);
        }
        table.write(&mut out);

        if tensors {
            out.push_str("\ntensors\n");
            let mut table = Table::new("  lllrrr");
            table.row(["name", "type", "shape (row-major)", "part", "offset", "bytes"].map(str::to_owned));
            for tensor in &self.tensors {
                let numbers = [tensor.part as u64, tensor.offset, tensor.bytes].map(|n| n.to_string());
                let [part, offset, bytes] = numbers;
                table.row([tensor.name.clone(), tensor.ty.into(), format!("{:?}", tensor.shape), part, offset, bytes]);
            }
            table.write(&mut out);
        }
        out
    }
}

fn type_of(key: &KeyDescription) -> String {
    match (key.element, key.length) {
        (Some(element), Some(length)) => format!("{element}[{length}]"),
        _ => key.ty.to_owned(),
    }
}

fn value_of(key: &KeyDescription) -> String {
    match &key.value {
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Array(shown) => {
            let mut text: Vec<String> = shown.iter().map(ToString::to_string).collect();
            if key.length.is_some_and(|length| length > shown.len() as u64) {
                text.push("…".to_owned());
            }
            format!("[{}]", text.join(", "))
        }
        value => value.to_string(),
    }
}

/// A count of bytes, also in binary units.
fn size(bytes: u64) -> String {
    let units = [(1u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{bytes} bytes ({:.2} {name})", bytes as f64 / *unit as f64),
        None => format!("{bytes} bytes"),
    }
}

fn billions(parameters: u64) -> String {
    match parameters {
        0..1_000_000 => format!("{:.1} K", parameters as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", parameters as f64 / 1e6),
        _ => format!("{:.1} B", parameters as f64 / 1e9),
    }
}

/// Rows of cells, aligned to the widest of each column.
struct Table {
    indent: usize,
    /// `l` or `r` per column.
    align: Vec<char>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A layout such as `"  lr"`: indent, then one letter per column.
    fn new(layout: &str) -> Self {
        let indent = layout.chars().take_while(|c| *c == ' ').count();
        Table { indent, align: layout.chars().skip(indent).collect(), rows: Vec::new() }
    }

    fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().map(|cell| printable(&cell)).collect());
    }

    fn write(&self, out: &mut String) {
        /// A cell wider than this does not widen its column.
        const WIDEST: usize = 64;
        let mut widths = vec![0; self.align.len()];
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count().min(WIDEST));
            }
        }
        for row in &self.rows {
            let mut line = " ".repeat(self.indent);
            for ((cell, align), &width) in row.iter().zip(&self.align).zip(&widths) {
                match align {
                    'r' => line += &format!("{cell:>width$}  "),
                    _ => line += &format!("{cell:<width$}  "),
                }
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
    }
}

/// Text from a file that nobody vouches for: control characters, and those that reorder a line, are escaped.
fn printable(text: &str) -> String {
    let risky = |c: char| {
        c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !text.chars().any(risky) {
        return text.to_owned();
    }
    text.chars().fold(String::with_capacity(text.len()), |mut out, c| {
        match risky(c) {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
        out
    })
}
