//! What goes to stdout.

use std::io::Write;

use anyhow::Result;
use serde::Serialize;

/// Prints text as it is.
pub fn print(text: &str) -> Result<()> {
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

/// Prints a JSON document and a newline.
pub fn print_json(value: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    print(&text)
}
