//! The ggshard command.
fn main() {}
