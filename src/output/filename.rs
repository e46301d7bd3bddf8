//! Which file names a checkpoint may hold.

/// The manifest's name in the folder.
pub const MANIFEST: &str = "ggshard.json";
/// The name of the list of digests that `b3sum --check` takes.
pub const SUMS: &str = "B3SUMS";
/// The file in which Hugging Face loaders look up which part holds a tensor.
pub const INDEX: &str = "model.safetensors.index.json";

/// The folder, in the output folder, of a conversion that is not finished.
pub const WORK: &str = "ggshard.work";

/// Why `name` may not stand in a manifest or in `B3SUMS`; `None` when it may.
///
/// A name is plain and relative, with one sub-folder at most (`mtp/model-rank-0-part-0.safetensors`), so that joining it
/// to the checkpoint's folder never leaves that folder, and it never needs escaping in a line of text.
pub fn objection(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        return Some("an empty name");
    }
    if name.chars().any(char::is_control) {
        return Some("a control character in the name");
    }
    if name.contains('\\') {
        return Some("a backslash in the name");
    }
    if name.starts_with('/') {
        return Some("an absolute path");
    }
    let mut components = 0;
    for component in name.split('/') {
        components += 1;
        if component.is_empty() {
            return Some("an empty path component");
        }
        if component == "." || component == ".." {
            return Some("a path that leaves its folder");
        }
        if component.len() > 255 {
            return Some("a path component of more than 255 bytes");
        }
    }
    (components > 2).then_some("more than one sub-folder")
}

/// The sub-folder of a checkpoint file's name, `""` for a file that lies in the checkpoint's folder itself.
pub fn folder(name: &str) -> &str {
    name.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// The name without its sub-folder.
pub fn base(name: &str) -> &str {
    name.rsplit_once('/').map_or(name, |(_, base)| base)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_relative_names_pass() {
        for name in ["model-rank-0-part-0.safetensors", "mtp/x.safetensors", "a..b", "..a", "名前", "a b"] {
            assert_eq!(objection(name), None, "{name}");
        }
    }

    #[test]
    fn names_that_leave_the_folder_are_refused() {
        let long = "x".repeat(256);
        for name in [
            "",
            "/",
            "/etc/passwd",
            "..",
            ".",
            "../x",
            "a/..",
            "a/./b",
            "a//b",
            "a/",
            "a/b/c",
            "a\\b",
            "a\0b",
            "a\nb",
            &long,
        ] {
            assert!(objection(name).is_some(), "{name:?}");
        }
    }
}
