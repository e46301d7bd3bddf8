//! `ggshard mappings`, `ggshard profiles` and `ggshard policies`: what is built in, and what it says.

use std::process::ExitCode;

use anyhow::Result;
use ggshard::mapping::{Mapping, OutputPolicy, Profile, RulesId, builtin_mappings};
use serde::Serialize;

use super::args::Library;
use super::print::{print, print_json};

/// A mapping in a list.
#[derive(Serialize)]
struct MappingRow {
    #[serde(flatten)]
    id: RulesId,
    class: String,
    architectures: Vec<String>,
    because: String,
    about: String,
}

/// A profile in a list.
#[derive(Serialize)]
struct ProfileRow {
    #[serde(flatten)]
    id: RulesId,
    about: String,
    checked: String,
    launch: Vec<String>,
    /// Forms of weights beside plain floats.
    formats: Vec<&'static str>,
    classes: Vec<String>,
}

/// An output policy in a list.
#[derive(Serialize)]
struct PolicyRow {
    #[serde(flatten)]
    id: RulesId,
    about: String,
}

fn mapping_row(mapping: &Mapping) -> MappingRow {
    let rules = &mapping.rules;
    let matching = rules.matching.as_ref();
    MappingRow {
        id: mapping.id(),
        class: rules.class.clone(),
        architectures: matching.map(|m| m.architecture.as_slice().to_vec()).unwrap_or_default(),
        because: matching.map(|m| m.because.clone()).unwrap_or_default(),
        about: rules.about.clone(),
    }
}

fn profile_row(profile: &Profile) -> ProfileRow {
    let rules = &profile.rules;
    let mut classes: Vec<String> = rules.layouts.iter().flat_map(|l| l.classes.iter().cloned()).collect();
    classes.sort();
    classes.dedup();
    ProfileRow {
        id: profile.id(),
        about: rules.about.clone(),
        checked: rules.checked.clone(),
        launch: rules.launch.clone(),
        formats: rules.formats.iter().flatten().map(|format| format.name()).collect(),
        classes,
    }
}

/// `ggshard mappings`
pub fn mappings(args: &Library) -> Result<ExitCode> {
    if let Some(name) = &args.name {
        let mapping = Mapping::load(name)?;
        let row = mapping_row(&mapping);
        if args.json {
            print_json(&row)?;
        } else {
            print(&format!("# {}\n", describe_mapping(&row)))?;
            print(&mapping.source())?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<MappingRow> = builtin_mappings()?.iter().map(mapping_row).collect();
    if args.json {
        print_json(&rows)?;
    } else {
        for row in rows {
            print(&format!("{:16} {}\n{:16} {}\n", row.id.name, row.about, "", describe_mapping(&row)))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn describe_mapping(row: &MappingRow) -> String {
    if row.architectures.is_empty() {
        return "chosen only by name or as a base of others".into();
    }
    let because = if row.because.is_empty() { String::new() } else { format!(", {}", row.because) };
    format!("{}, for general.architecture {}{because}", row.class, row.architectures.join(" or "))
}

/// `ggshard profiles`
pub fn profiles(args: &Library) -> Result<ExitCode> {
    if let Some(name) = &args.name {
        let profile = Profile::load(name)?;
        let row = profile_row(&profile);
        if args.json {
            print_json(&row)?;
        } else {
            print(&profile.source())?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<ProfileRow> = Profile::all()?.iter().map(profile_row).collect();
    if args.json {
        print_json(&rows)?;
    } else {
        for row in rows {
            print(&format!("{:16} {}\n{:16} checked: {}\n", row.id.name, row.about, "", row.checked))?;
            for line in &row.launch {
                print(&format!("{:16} launch: {line}\n", ""))?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// `ggshard policies`
pub fn policies(args: &Library) -> Result<ExitCode> {
    let row = |policy: &OutputPolicy| PolicyRow { id: policy.id(), about: policy.rules.about.clone() };
    if let Some(name) = &args.name {
        let policy = OutputPolicy::load(name)?;
        if args.json {
            print_json(&row(&policy))?;
        } else {
            print(&policy.source())?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<PolicyRow> = OutputPolicy::all()?.iter().map(row).collect();
    if args.json {
        print_json(&rows)?;
    } else {
        rows.iter().try_for_each(|row| print(&format!("{:16} {}\n", row.id.name, row.about)))?;
    }
    Ok(ExitCode::SUCCESS)
}
