//! Comparing a checkpoint with its source: the conversion is planned and executed again, and every byte compared.
//!
//! What is trusted is this program and the GGUF, not the manifest: the plan is made anew by the rules that the manifest
//! names, so a manifest that was rewritten together with the files still shows. Memory and speed are those of a
//! conversion that reads where it would write.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Read;
use std::path::Path;

use super::bytes::Comparer;
use super::report::SOURCE;
use super::{Finding, Options, Report, Step, What};
use crate::convert::{self, InputScalesFrom, Planned, Request};
use crate::dequant::{FloatType, Nonfinite};
use crate::engine::{self, Engine, Observer};
use crate::error::{Error, Fault, Result};
use crate::gguf::{GgufSet, OpenOptions};
use crate::mapping::{Mapping, MtpPolicy, OutputPolicy, Profile, RulesId};
use crate::output::filename;
use crate::output::manifest::{FileEntry, Manifest, Parameter};
use crate::output::{Digest, SafetensorsHeader, SourceHasher, header_of};
use crate::plan::{DRAFT_FOLDER, InputScales, Plan, PlannedFile};
use crate::regular;

/// A source that is the manifest's, with the manifest's plan.
pub(super) struct Source {
    planned: Planned,
}

impl Source {
    /// Opens the source, and refuses one that is not the manifest's, or that this version would plan otherwise. `path` is
    /// the manifest's, for messages.
    pub fn open(source: &Path, options: OpenOptions, manifest: &Manifest, path: &Path) -> Result<Self> {
        let set = GgufSet::open_with(source, options)?;
        check_parts(&set, manifest)?;
        set.refuse_nonmodel()?;
        let (mapping, profile) = (mapping(manifest, path)?, profile(manifest, path)?);
        let (policy, request) = (policy(manifest, path)?, request(manifest, path)?);
        let planned = convert::plan_by(set, mapping, profile, policy, &request)?;
        let identity = Digest::from(planned.plan.identity());
        if identity != manifest.plan {
            return Err(Fault::new(format!("the plan {}", manifest.plan))
                .file(path)
                .key("plan")
                .expected(format!("{identity}, the plan that this source gives with the manifest's rules and policy"))
                .remedy(other_version(manifest))
                .checkpoint());
        }
        Ok(Source { planned })
    }

    /// Compares every byte of the files that `options` asks for and adds to `report`.
    pub fn check(
        &self,
        dir: &Path,
        manifest: &Manifest,
        options: &Options,
        progress: &(dyn Fn(Step) + Sync),
        report: &mut Report,
    ) -> Result<()> {
        let Planned { set, plan, .. } = &self.planned;
        let ranks = options.rank.map_or_else(|| manifest.topology.ranks.clone(), |rank| vec![rank]);
        let metadata = convert::metadata(manifest.tool.strip_prefix(convert::TOOL).unwrap_or_default());
        let mut header_bytes = vec![0; plan.files.len()];
        let mut total = 0;
        check_names(plan, manifest, report);
        let absent = super::absent(report);
        let entries: HashMap<&str, &FileEntry> = manifest.files.iter().map(|f| (f.name.as_str(), f)).collect();
        for (index, file) in plan.files.iter().enumerate().filter(|(_, file)| ranks.contains(&file.rank)) {
            let header = header_of(plan, file, &metadata)?;
            header_bytes[index] = header.header_bytes;
            total += file.data_bytes;
            if let Some(entry) = entries.get(file.name.as_str()) {
                check_entry(plan, file, &header, entry, report);
            }
            if !absent.contains(&file.name) {
                check_header(dir, &file.name, &header, report)?;
            }
        }
        progress(Step::Begin { check: SOURCE, bytes: total });
        let engine_options = engine::Options {
            ranks: ranks.clone(),
            threads: options.threads,
            // A value that should not be there is a finding, below, and no reason to stop at the first.
            allow_nonfinite: true,
            cancel: options.cancel.clone(),
            ..engine::Options::default()
        };
        let comparer = Comparer::new(plan, dir, &ranks, &header_bytes);
        // Recorded digests are compared in the same pass.
        let hasher = manifest.source.parts.iter().any(|part| part.blake3.is_some()).then(|| SourceHasher::new(set));
        let observer = hasher.as_ref().map(|hasher| hasher as &dyn Observer);
        let engine = Engine::new(plan, set, engine_options).observed(observer);
        let outcome = engine.run(&comparer, &|bytes| progress(Step::Bytes(bytes)))?;
        for finding in comparer.deviations(manifest) {
            report.push(finding);
        }
        comparer.finish(report)?;
        if let Some(hasher) = hasher {
            check_digests(&hasher.finish(options.threads, options.cancel.as_deref())?, manifest, report);
        }
        // Of other ranks than the conversion made, other values are counted.
        let counted = (ranks == manifest.topology.ranks).then_some(&outcome.nonfinite);
        check_parameters(plan, manifest, counted, report);
        check_others(plan, manifest, report)?;
        report.checks.push(SOURCE.into());
        Ok(())
    }
}

fn other_version(manifest: &Manifest) -> String {
    format!("Verify with the program that wrote the folder ({}), or convert again", manifest.tool)
}

/// The manifest's source and no other: the same parts by length and header. Names do not matter.
fn check_parts(set: &GgufSet, manifest: &Manifest) -> Result<()> {
    let (given, recorded) = (convert::source_of(set)?.parts, &manifest.source.parts);
    let another = |fault: Fault| {
        fault.remedy("This is not the source of the folder: give the one it was converted from").checkpoint()
    };
    if given.len() != recorded.len() {
        let fault = Fault::new(format!("a source of {} parts", given.len())).file(set.path());
        return Err(another(fault.expected(format!("{} parts, as the manifest says", recorded.len()))));
    }
    for (i, ((given, recorded), part)) in given.iter().zip(recorded).zip(set.parts()).enumerate() {
        let fault = |found: String, expected: String| {
            let which = format!("'{}', part {} of {}", recorded.name, i + 1, manifest.source.parts.len());
            let expected = format!("{expected}, as the manifest says of {which}");
            another(Fault::new(found).file(part.path()).expected(expected))
        };
        if given.header_blake3 != recorded.header_blake3 || given.header_bytes != recorded.header_bytes {
            let text = |bytes: u64, digest: Digest| format!("a header of {bytes} bytes with BLAKE3 {digest}");
            return Err(fault(
                text(given.header_bytes, given.header_blake3),
                text(recorded.header_bytes, recorded.header_blake3),
            ));
        }
        if given.bytes != recorded.bytes {
            return Err(fault(format!("a file of {} bytes", given.bytes), format!("{} bytes", recorded.bytes)));
        }
    }
    Ok(())
}

/// The mapping that the manifest records.
fn mapping(manifest: &Manifest, path: &Path) -> Result<Mapping> {
    let recorded = &manifest.mapping;
    let mapping = match recorded.texts.as_slice() {
        [] => Mapping::builtin(&recorded.name),
        texts => Mapping::from_texts(texts),
    };
    let mapping = mapping.map_err(|error| unknown(error, "mapping", manifest, path))?;
    check_rules("mapping", &mapping.id(), (&recorded.name, &recorded.version, recorded.digest), manifest, path)?;
    Ok(mapping)
}

/// The profile that the manifest records.
fn profile(manifest: &Manifest, path: &Path) -> Result<Profile> {
    let recorded = &manifest.profile;
    let profile = recorded_profile(manifest).map_err(|error| unknown(error, "profile", manifest, path))?;
    check_rules("profile", &profile.id(), (&recorded.name, &recorded.version, recorded.digest), manifest, path)?;
    Ok(profile)
}

/// The output policy that the manifest records, if there was one.
fn policy(manifest: &Manifest, path: &Path) -> Result<Option<OutputPolicy>> {
    let Some(recorded) = &manifest.policy.rules else { return Ok(None) };
    let policy = match recorded.texts.as_slice() {
        [] => OutputPolicy::builtin(&recorded.name),
        [text] => OutputPolicy::from_text(text),
        several => Err(Fault::new(format!("{} texts", several.len())).expected("one").rules()),
    };
    let policy = policy.map_err(|error| unknown(error, "policy.rules", manifest, path))?;
    let recorded = (recorded.name.as_str(), recorded.version.as_str(), recorded.digest);
    check_rules("policy.rules", &policy.id(), recorded, manifest, path)?;
    Ok(Some(policy))
}

/// The profile by its recorded text, or the built-in one of its name, whatever its digest.
pub(super) fn recorded_profile(manifest: &Manifest) -> Result<Profile> {
    match manifest.profile.texts.as_slice() {
        [] => Profile::builtin(&manifest.profile.name),
        texts => Profile::from_texts(texts),
    }
}

fn unknown(error: Error, key: &str, manifest: &Manifest, path: &Path) -> Error {
    let mut fault = Fault::new(error.fault().found.clone()).file(path).key(key).remedy(other_version(manifest));
    fault.expected.clone_from(&error.fault().expected);
    fault.checkpoint()
}

fn check_rules(
    key: &str,
    rules: &RulesId,
    (name, version, digest): (&str, &str, Digest),
    manifest: &Manifest,
    path: &Path,
) -> Result<()> {
    if rules.name == name && rules.version.to_string() == version && rules.digest == digest.to_string() {
        return Ok(());
    }
    Err(Fault::new(format!("{key} '{name}' version {version} with BLAKE3 {digest}"))
        .file(path)
        .key(key)
        .expected(format!("'{}' version {} with BLAKE3 {}, as it is here", rules.name, rules.version, rules.digest))
        .remedy(format!("These rules have changed since the conversion. {}", other_version(manifest)))
        .checkpoint())
}

fn request(manifest: &Manifest, path: &Path) -> Result<Request> {
    let policy = &manifest.policy;
    let unknown = |key: &str, found: &str| {
        Fault::new(format!("'{found}'")).file(path).key(key).remedy(other_version(manifest)).checkpoint()
    };
    let dtypes = [FloatType::BF16, FloatType::F16, FloatType::F32];
    let float = |name: &str| dtypes.into_iter().find(|dtype| dtype.name().to_lowercase() == name);
    let dtype = float(&policy.dtype);
    let keep_or = policy.keep_or.as_ref().map(|or| float(or).ok_or(or)).transpose();
    let policies = [MtpPolicy::Keep, MtpPolicy::Drop, MtpPolicy::Only];
    let mtp = policies.into_iter().find(|mtp| mtp.name() == policy.mtp);
    Ok(Request {
        mapping: None,
        profile: manifest.profile.name.clone(),
        tp: manifest.topology.tp,
        dtype: dtype.ok_or_else(|| unknown("policy.dtype", &policy.dtype))?,
        policy: None,
        keep_or: keep_or.map_err(|or| unknown("policy.keep_or", or))?,
        nvfp4_search: policy.nvfp4_search,
        input_scales: match policy.input_scales.is_empty() {
            true => None,
            false => Some(InputScalesFrom::Given(InputScales {
                by_name: policy.input_scales.clone(),
                place: path.to_path_buf(),
            })),
        },
        mtp: mtp.ok_or_else(|| unknown("policy.mtp", &policy.mtp))?,
        part_size: policy.part_size,
        pp: manifest.topology.pp,
        stage_layers: manifest.topology.stage_layers.clone(),
        expert_parallel: manifest.topology.expert_parallel,
        moe_pad: policy.moe_pad,
    })
}

/// The manifest must list the planned files of its ranks and no others.
fn check_names(plan: &Plan, manifest: &Manifest, report: &mut Report) {
    let in_folder = |file: &&PlannedFile| manifest.topology.ranks.contains(&file.rank);
    let planned: BTreeSet<&str> = plan.files.iter().filter(in_folder).map(|file| file.name.as_str()).collect();
    let listed: BTreeSet<&str> = manifest.files.iter().map(|file| file.name.as_str()).collect();
    let record = || Finding::new(filename::MANIFEST, What::Record);
    for name in planned.difference(&listed) {
        report.push(record().expected(format!("the file '{name}'")).found("no such file"));
    }
    for name in listed.difference(&planned) {
        report.push(record().found(format!("a file '{name}', which the source does not give")));
    }
}

/// The manifest's entry of a file must be the plan's, digests aside.
fn check_entry(plan: &Plan, file: &PlannedFile, header: &SafetensorsHeader, entry: &FileEntry, report: &mut Report) {
    let record = || Finding::new(filename::MANIFEST, What::Record);
    let facts = |rank: Option<u32>, header: u64, bytes: u64| {
        let rank = rank.map_or("every rank".to_owned(), |rank| format!("rank {rank}"));
        format!("'{}' for {rank}, {bytes} bytes with a header of {header}", file.name)
    };
    let expected = facts(plan.rank_of(file), header.header_bytes, header.file_bytes());
    let found = facts(entry.rank, entry.header_bytes, entry.bytes);
    if expected != found {
        report.push(record().expected(expected).found(found));
    }
    let planned: Vec<_> = header.tensors.iter().map(|t| (&t.name, t.dtype, &t.shape, t.offsets)).collect();
    let listed: Vec<_> = entry.tensors.iter().map(|t| (&t.name, t.dtype, &t.shape, t.offsets)).collect();
    for difference in unlike(&planned, &listed, |tensor| tensor.0) {
        report.push(
            difference
                .record(&file.name, |(_, dtype, shape, (begin, end))| format!("{dtype} {shape:?} at [{begin},{end}]")),
        );
    }
}

/// The file's header must be, byte for byte, the one that would be written.
fn check_header(dir: &Path, name: &str, planned: &SafetensorsHeader, report: &mut Report) -> Result<()> {
    let expected = planned.to_bytes()?;
    let path = dir.join(name);
    let mut found = Vec::new();
    let read = regular::open(&path).and_then(|(file, _)| file.take(planned.header_bytes).read_to_end(&mut found));
    if let Err(error) = read {
        report.push(Finding::new(name, What::Unreadable).found(error));
        return Ok(());
    }
    if found == expected {
        return Ok(());
    }
    let header = match SafetensorsHeader::read(&path) {
        Ok(header) => header,
        Err(error) => {
            let mut fault = error.fault().clone();
            fault.file = None;
            report.push(Finding::new(name, What::Header).found(fault));
            return Ok(());
        }
    };
    let mut explained = false;
    for difference in unlike(&planned.tensors, &header.tensors, |tensor| &tensor.name) {
        explained = true;
        let text =
            |t: &crate::output::TensorInfo| format!("{} {:?} at [{},{}]", t.dtype, t.shape, t.offsets.0, t.offsets.1);
        report.push(difference.finding(Finding::new(name, What::Header), text));
    }
    if !explained {
        let first = found.iter().zip(&expected).take_while(|(found, expected)| found == expected).count();
        let finding = Finding::new(name, What::Header).expected("the header that the plan gives");
        report.push(finding.found(format!("other bytes from byte {first} of the file")));
    }
    Ok(())
}

/// One entry of two lists that should be equal.
struct Unlike<'a, T> {
    name: &'a str,
    expected: Option<&'a T>,
    found: Option<&'a T>,
}

impl<T> Unlike<'_, T> {
    fn finding(&self, finding: Finding, text: impl Fn(&T) -> String) -> Finding {
        let nothing = || "no such entry".to_owned();
        let (expected, found) = (self.expected.map_or_else(nothing, &text), self.found.map_or_else(nothing, &text));
        let place = if expected == found { "another place in the list" } else { found.as_str() };
        finding.tensor(self.name).expected(expected.clone()).found(place)
    }

    fn record(&self, file: &str, text: impl Fn(&T) -> String) -> Finding {
        let place = if file.is_empty() { String::new() } else { format!(" in '{file}'") };
        let mut finding = self.finding(Finding::new(filename::MANIFEST, What::Record), text);
        finding.found = finding.found.map(|found| found + &place);
        finding
    }
}

/// Entries that are in one list only, or differ. Of lists that differ in nothing but their order, the first such entry.
fn unlike<'a, T: PartialEq>(expected: &'a [T], found: &'a [T], name: impl Fn(&'a T) -> &'a str) -> Vec<Unlike<'a, T>> {
    if expected == found {
        return Vec::new();
    }
    let mut named: HashMap<&str, &T> = found.iter().map(|entry| (name(entry), entry)).collect();
    let mut all = Vec::new();
    for entry in expected {
        let found = named.remove(name(entry));
        if found != Some(entry) {
            all.push(Unlike { name: name(entry), expected: Some(entry), found });
        }
    }
    for entry in found.iter().filter(|entry| named.contains_key(name(entry))) {
        all.push(Unlike { name: name(entry), expected: None, found: Some(entry) });
    }
    if all.is_empty() {
        let moved = expected.iter().zip(found).find(|(expected, found)| expected != found);
        all.extend(moved.map(|(entry, _)| Unlike { name: name(entry), expected: Some(entry), found: Some(entry) }));
    }
    all
}

/// The manifest's parameters and ignored tensors must be the plan's, with as many values that are not finite.
fn check_parameters(plan: &Plan, manifest: &Manifest, counted: Option<&BTreeMap<u32, Nonfinite>>, report: &mut Report) {
    let mut expected = convert::parameters(plan, counted.unwrap_or(&BTreeMap::new()));
    let key = |p: &Parameter| (p.set.clone(), p.name.clone());
    let recorded: HashMap<(String, String), &Parameter> = manifest.parameters.iter().map(|p| (key(p), p)).collect();
    for parameter in &mut expected {
        let Some(recorded) = recorded.get(&key(parameter)) else { continue };
        let text = |p: &Parameter| format!("{} NaN, {} infinite, {} overflowed", p.nan, p.inf, p.overflow);
        if counted.is_some() && text(parameter) != text(recorded) {
            let finding = Finding::new(filename::MANIFEST, What::Nonfinite).tensor(&parameter.name);
            report.push(finding.expected(text(recorded)).found(format!("{} in the source", text(parameter))));
        }
        (parameter.nan, parameter.inf, parameter.overflow) = (recorded.nan, recorded.inf, recorded.overflow);
    }
    // A draft model's set repeats names of the model's.
    for set in ["", DRAFT_FOLDER] {
        let of = |list: &[Parameter]| list.iter().filter(|p| p.set == set).cloned().collect::<Vec<_>>();
        for difference in unlike(&of(&expected), &of(&manifest.parameters), |parameter| &parameter.name) {
            report.push(
                difference.record(set, |p| format!("{} {:?}, cut {}, from {:?}", p.dtype, p.shape, p.cut, p.sources)),
            );
        }
    }
    for difference in unlike(&convert::ignored(plan), &manifest.ignored, |ignored| &ignored.tensor) {
        report.push(difference.record("", |ignored| format!("ignored: {}", ignored.reason)));
    }
}

/// The source's files must be those whose digests were recorded, to the byte: ignored tensors and padding included.
fn check_digests(found: &[Digest], manifest: &Manifest, report: &mut Report) {
    for (part, found) in manifest.source.parts.iter().zip(found) {
        if let Some(expected) = part.blake3.filter(|expected| expected != found) {
            let finding = Finding::new(filename::MANIFEST, What::SourceDigest);
            report.push(finding.expected(format!("{expected} for '{}'", part.name)).found(found));
        }
    }
}

/// The index beside the weights is made from the plan too.
fn check_others(plan: &Plan, manifest: &Manifest, report: &mut Report) -> Result<()> {
    let Some((name, bytes)) = convert::index(plan, &manifest.files)? else { return Ok(()) };
    let expected = Digest::of(&bytes);
    let found = manifest.others.iter().find(|other| other.name == name).map(|other| other.blake3);
    if found != Some(expected) {
        let found = found.map_or("no such file".to_owned(), |digest| digest.to_string());
        report.push(Finding::new(name, What::Index).expected(expected).found(found));
    }
    Ok(())
}
