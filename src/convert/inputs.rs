//! Scales of activations, which no GGUF's weights tell: from a checkpoint that was calibrated, or from a GGUF that has them.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::dtype::Dtype;
use crate::error::{Error, Fault, Result};
use crate::gguf::{GgmlType, GgufSet};
use crate::mapping::Model;
use crate::output::SafetensorsHeader;
use crate::plan::InputScales;
use crate::regular;

/// Where scales of activations come from.
#[derive(Debug, Clone, PartialEq)]
pub enum InputScalesFrom {
    /// These.
    Given(InputScales),
    /// Tensors of the source that belong to its weights: `X.input_scale` beside `X.weight`.
    Source,
}

/// What the names of such tensors end with.
const SUFFIX: &str = ".input_scale";
/// The word that stands for the source itself.
const SOURCE: &str = "source";

impl InputScalesFrom {
    /// The word `source`, or a safetensors file or folder of such files, as ModelOpt writes them: tensors
    /// `….input_scale` of one F32 each. Other tensors are not looked at.
    ///
    /// # Errors
    ///
    /// Those of reading the files, and [`Error::Checkpoint`] where there is no such tensor, one has another type or shape, or
    /// two have the same name.
    pub fn load(place: &str) -> Result<Self> {
        if place == SOURCE {
            return Ok(InputScalesFrom::Source);
        }
        let path = Path::new(place);
        let mut scales = InputScales { by_name: BTreeMap::new(), place: path.to_path_buf() };
        for file in files(path)? {
            read(&file, &mut scales)?;
        }
        if scales.by_name.is_empty() {
            let fault = Fault::new(format!("no tensor ends with '{SUFFIX}'")).file(path);
            return Err(fault.expected("a checkpoint that ModelOpt made with activations in four bits").checkpoint());
        }
        Ok(InputScalesFrom::Given(scales))
    }
}

/// The safetensors files of a folder, by name, or the one file.
fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let unreadable = |e| Error::io("list", path, e);
    let entries = std::fs::read_dir(path).map_err(unreadable)?.collect::<Result<Vec<_>, _>>().map_err(unreadable)?;
    let mut files: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "safetensors"));
    files.sort();
    Ok(files)
}

fn read(path: &Path, scales: &mut InputScales) -> Result<()> {
    let (mut file, length) = regular::open(path).map_err(|e| Error::io("open", path, e))?;
    let header = SafetensorsHeader::read_from(&mut file, length, path)?;
    for tensor in header.tensors.iter().filter(|tensor| tensor.name.ends_with(SUFFIX)) {
        let fault = |found: String| Fault::new(found).file(path).tensor(&tensor.name);
        if tensor.dtype != Dtype::F32 || tensor.shape.iter().product::<u64>() != 1 {
            let found = format!("{} {:?}", tensor.dtype, tensor.shape);
            return Err(fault(found).expected("one F32: the scale of one weight's activations").checkpoint());
        }
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, header.header_bytes + tensor.offsets.0)
            .map_err(|e| Error::io("read", path, e))?;
        if scales.by_name.insert(tensor.name.clone(), f32::from_le_bytes(bytes)).is_some() {
            return Err(fault("it is in another file as well".into()).checkpoint());
        }
    }
    Ok(())
}

/// The scales that a GGUF has beside its weights, one for each tensor or for each expert of it.
pub(super) fn of_source(set: &GgufSet, model: &Model) -> Result<InputScales> {
    let mut by_name = BTreeMap::new();
    for weight in &model.weights {
        let [part] = weight.recipe.parts.as_slice() else { continue };
        let tensor = &set.tensors()[part.source as usize];
        let beside = tensor.name.strip_suffix(".weight").and_then(|stem| set.find(&format!("{stem}{SUFFIX}")));
        let Some(index) = beside else { continue };
        let scales = &set.tensors()[index];
        let experts = if let [experts, _, _] = tensor.shape()[..] { experts } else { 1 };
        let count = scales.elements();
        if scales.ty != GgmlType::F32 || (count != 1 && count != experts) {
            let found =
                format!("{} {:?}, beside '{}' of shape {:?}", scales.ty, scales.ne, tensor.name, tensor.shape());
            let fault = Fault::new(found).file(set.parts()[scales.part].path()).tensor(&scales.name);
            let expected = if experts == 1 { "1 F32".to_owned() } else { format!("1 or {experts} F32") };
            return Err(fault.expected(expected).contradiction());
        }
        // The expert that the weight is, or is of.
        let element = if count == 1 { 0 } else { part.start / (tensor.elements() / count).max(1) };
        let mut buffer = Vec::new();
        let bytes = set.read(index, element * 4..element * 4 + 4, &mut buffer)?;
        let value = bytes.try_into().map_or(f32::NAN, f32::from_le_bytes);
        by_name.insert(InputScales::name(&weight.name), value);
    }
    if by_name.is_empty() {
        return Err(Fault::new("the file has no scales of activations")
            .file(set.path())
            .expected(format!("tensors whose names end with '{SUFFIX}'"))
            .remedy("A GGUF holds no statistics of activations. Give those of a calibrated checkpoint with --input-scales FILE, or leave it out: weights alone are then in four bits")
            .contradiction());
    }
    Ok(InputScales { by_name, place: set.path().to_path_buf() })
}
