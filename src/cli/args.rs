//! What can be typed.

use std::path::PathBuf;

use clap::{ArgAction, Parser, Subcommand, ValueEnum};
use ggshard::convert::Direct;
use ggshard::dequant::FloatType;
use ggshard::engine::Device;
use ggshard::gguf::Io;
use ggshard::mapping::MtpPolicy;

/// Turns GGUF models into pre-sharded, per-rank tensor-parallel safetensors, and proves that every tensor is placed.
#[derive(Debug, Parser)]
#[command(name = "ggshard", version, max_term_width = 110)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Tell more on stderr; twice for debugging.
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub verbose: u8,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show what a GGUF file or split set holds. Needs no known architecture.
    Inspect(Inspect),
    /// Plan a conversion without writing anything: bytes per rank, types, everything that would be refused.
    Plan(PlanArgs),
    /// Convert a GGUF into per-rank safetensors, with a manifest that is written last.
    Convert(Convert),
    /// Make a folder into which several processes have converted ranks a checkpoint: check that nothing is missing, write the
    /// manifest.
    Seal(Seal),
    /// Check a converted folder: every file and tensor against the manifest, and on request against the source.
    Verify(Verify),
    /// Measure what limits conversions on this machine, and how near one comes to the limit.
    Bench(Bench),
    /// List the CUDA devices that conversions can use, and why others cannot be used.
    Devices(Devices),
    /// List the built-in mappings, or show one: which models it is for and its rules.
    Mappings(Library),
    /// List the built-in profiles, or show one: which stack it is for, what it was checked against, the launch it assumes.
    Profiles(Library),
    /// List the built-in output policies, or show one: which weights are written in which form.
    Policies(Library),
    /// Print a completion script for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

/// `ggshard inspect`
#[derive(Debug, clap::Args)]
pub struct Inspect {
    /// A GGUF file, any part of a split set, or a folder that holds one set.
    pub source: PathBuf,
    #[command(flatten)]
    pub read: ReadChoices,
    /// List every tensor.
    #[arg(long)]
    pub tensors: bool,
    /// Read every value: count those that are NaN or infinite and find tensors of zeros. Exit status 1 if any is not finite.
    #[arg(long)]
    pub check: bool,
    /// With --check: give the BLAKE3 of every file, in the same pass.
    #[arg(long, requires = "check")]
    pub hash: bool,
    /// Number of threads for --check. Default: one per CPU.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub threads: usize,
    /// Print one JSON document.
    #[arg(long)]
    pub json: bool,
}

/// How a source is read.
#[derive(Debug, clap::Args)]
pub struct ReadChoices {
    /// How the source's bytes are fetched. It changes no byte of the output.
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub io: IoArg,
}

/// How bytes are fetched.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum IoArg {
    /// Mapped into memory: no copy, but whatever happens to the file ends the program.
    Mmap,
    /// Read into buffers.
    Pread,
    /// Mapped on local file systems, read on network ones; part by part.
    Auto,
}

impl From<IoArg> for Io {
    fn from(arg: IoArg) -> Self {
        match arg {
            IoArg::Mmap => Io::Mmap,
            IoArg::Pread => Io::Pread,
            IoArg::Auto => Io::MmapIfLocal,
        }
    }
}

/// When output is written past the page cache.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum DirectArg {
    /// Where it is worth it.
    Auto,
    /// Wherever the file system knows how.
    On,
    /// Never.
    Off,
}

impl From<DirectArg> for Direct {
    fn from(arg: DirectArg) -> Self {
        match arg {
            DirectArg::Auto => Direct::Auto,
            DirectArg::On => Direct::On,
            DirectArg::Off => Direct::Off,
        }
    }
}

/// The choices that make a plan.
#[derive(Debug, clap::Args)]
pub struct PlanChoices {
    /// A GGUF file, any part of a split set, or a folder that holds one set.
    pub source: PathBuf,
    /// Number of tensor-parallel ranks.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub tp: u32,
    /// The layout: a built-in profile or a TOML file.
    #[arg(long, value_name = "PROFILE", default_value = "hf")]
    pub profile: String,
    /// The names: a built-in mapping or a TOML file. Default: the one that fits the file.
    #[arg(long, value_name = "MAPPING")]
    pub mapping: Option<String>,
    /// Output type of weights that are not pinned to another. fp8 is --policy deepseek-fp8, nvfp4 is --policy modelopt-nvfp4,
    /// keep is --policy keep, each with bf16 for the rest.
    #[arg(long, value_name = "DTYPE", default_value = "bf16")]
    pub dtype: DtypeArg,
    /// Which weights are written in which form: a built-in policy or a TOML file. What it has no rule for follows --dtype.
    #[arg(long, value_name = "POLICY")]
    pub policy: Option<String>,
    /// Where a cut goes through blocks that the policy keeps, decode the weight to this type. Default: refuse.
    #[arg(long, value_name = "DTYPE")]
    pub keep_or: Option<FloatArg>,
    /// Choose the scale of each block of nvfp4 by the error that it leaves, instead of from its largest value. Slower.
    #[arg(long)]
    pub nvfp4_search: bool,
    /// Scales of activations for nvfp4 in weights and activations: a checkpoint that ModelOpt calibrated (file or folder), or
    /// `source` for a GGUF that has them. Default: weights alone are in nvfp4.
    #[arg(long, value_name = "FILE|DIR|source")]
    pub input_scales: Option<String>,
    /// What to do with multi-token-prediction blocks.
    #[arg(long, value_name = "WHAT", default_value = "keep")]
    pub mtp: MtpArg,
    /// Ranks hold whole experts instead of a slice of every expert (expert-parallel group = tensor-parallel group).
    #[arg(long)]
    pub ep: bool,
    /// Number of pipeline stages.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub pp: Option<u32>,
    /// Blocks per pipeline stage, as in 20,20,21. Default: as vLLM divides them.
    #[arg(long, value_name = "LAYERS", value_delimiter = ',')]
    pub pp_layers: Vec<u64>,
    /// Pad each rank's rows of an expert's gate and up, and columns of its down, with zeros to a multiple of this.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub moe_pad: Option<u64>,
    /// Begin a new file at this size, as in 5G, 500M or 1GiB (G and GiB are 2^30 bytes, GB is 10^9).
    #[arg(long, value_name = "SIZE", default_value = "5G", value_parser = size)]
    pub part_size: u64,
    #[command(flatten)]
    pub read: ReadChoices,
}

/// `ggshard plan`
#[derive(Debug, clap::Args)]
pub struct PlanArgs {
    #[command(flatten)]
    pub choices: PlanChoices,
    /// The source is a header whose tensor data is not there.
    #[arg(long)]
    pub header_only: bool,
    /// Say whether each rank's weights fit a GPU of this much memory, as in 96G.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub gpu_memory: Option<u64>,
    /// Print one JSON document, with every parameter.
    #[arg(long)]
    pub json: bool,
    /// Write a picture of the plan: one HTML page that needs nothing else.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// `ggshard convert`
#[derive(Debug, clap::Args)]
pub struct Convert {
    #[command(flatten)]
    pub choices: PlanChoices,
    /// The folder to write to. It is created, or must be empty.
    pub output: PathBuf,
    /// Make only these ranks, as in 0,2-3. Other processes may make others in the same folder; `ggshard seal` ends it.
    #[arg(long, value_name = "RANKS", value_parser = ranks)]
    pub ranks: Option<Ranks>,
    /// With --ranks: make the folder a checkpoint of these ranks alone.
    #[arg(long, requires = "ranks")]
    pub seal: bool,
    /// Go on where an earlier run into the folder ended, if there was one.
    #[arg(long)]
    pub resume: bool,
    /// The source may be a copy of the files that the conversion began with: other modification times, other inodes.
    #[arg(long)]
    pub same_source: bool,
    /// Number of threads. Default: one per CPU.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub threads: usize,
    /// Write past the page cache (O_DIRECT): less CPU time per byte, and other programs keep their cached files. auto: from
    /// 1 GiB of output on, on ext4, and without --threads; there are four workers per CPU then, since each waits for the disk.
    #[arg(long, value_name = "WHEN", value_enum, default_value = "auto", num_args = 0..=1, require_equals = true,
        default_missing_value = "on")]
    pub direct: DirectArg,
    /// What decodes: auto, cpu, cuda (the first device), or cuda:N,M. It changes no byte of the output. auto is the first
    /// CUDA device if there are at most 4 threads and at least 64 MiB of output, and the CPU otherwise or if that fails.
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: Device,
    /// The most memory that buffers may take. What a plan and a manifest take comes on top: some hundred bytes per tensor and
    /// rank.
    #[arg(long, value_name = "SIZE", default_value = "128M", value_parser = size)]
    pub mem_limit: u64,
    /// Let NaN, infinite and overflowing values through; they are counted in the manifest.
    #[arg(long)]
    pub allow_nonfinite: bool,
    /// Fail if the relative RMS error of an encoded tensor is larger, as in 0.03. Finished files stay for --resume.
    #[arg(long, value_name = "X", value_parser = max_rms)]
    pub max_error: Option<f64>,
    /// The model's own config.json, or a folder that holds it (its tokenizer files are copied as well). It is checked against
    /// the GGUF. Default: derived from the GGUF.
    #[arg(long, value_name = "FILE|DIR")]
    pub config: Option<PathBuf>,
    /// Record the BLAKE3 of every file of the source in the manifest. All of it is read, once.
    #[arg(long)]
    pub hash_source: bool,
    /// Remember every range fetched from the source and report repetitions (costs memory).
    #[arg(long, hide = true)]
    pub track_reads: bool,
    /// Bytes of output per tile.
    #[arg(long, hide = true, value_parser = size)]
    pub tile_size: Option<u64>,
    /// Print one JSON document when done.
    #[arg(long)]
    pub json: bool,
}

/// `ggshard seal`
#[derive(Debug, clap::Args)]
pub struct Seal {
    /// The folder that `convert --ranks` was given.
    pub folder: PathBuf,
    /// Seal these ranks only, as in 0,2-3; no others may be in the folder. Default: all ranks.
    #[arg(long, value_name = "RANKS", value_parser = ranks)]
    pub ranks: Option<Ranks>,
    /// Print one JSON document.
    #[arg(long)]
    pub json: bool,
}

/// `ggshard verify`
#[derive(Debug, clap::Args)]
pub struct Verify {
    /// A folder that ggshard wrote.
    pub folder: PathBuf,
    /// Recompute every tensor from this source and compare every byte.
    #[arg(long, value_name = "SRC")]
    pub source: Option<PathBuf>,
    #[command(flatten)]
    pub read: ReadChoices,
    /// Compare with an original checkpoint of the same model: exactly, or by relative RMS.
    #[arg(long, value_name = "HF_DIR")]
    pub reference: Option<PathBuf>,
    /// The largest relative RMS difference from the reference that passes.
    #[arg(long, value_name = "X", default_value_t = 0.0, requires = "reference", value_parser = max_rms)]
    pub max_rms: f64,
    /// Check only what this rank loads.
    #[arg(long, value_name = "R")]
    pub rank: Option<u32>,
    /// Number of threads. Default: one per CPU.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub threads: usize,
    /// Print one JSON document.
    #[arg(long)]
    pub json: bool,
}

/// `ggshard bench`
#[derive(Debug, clap::Args)]
pub struct Bench {
    /// Measure these CUDA devices instead of the CPU: copies, decoding, and with --source conversions by the CPU and by them.
    #[arg(long, value_name = "cuda:N", value_parser = cuda_devices)]
    pub device: Option<Device>,
    /// Where files are written and read, as conversions would; they are removed. A folder that exists.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,
    /// Bytes of the files that are written and read.
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = size)]
    pub size: u64,
    /// Also convert this GGUF into DIR, three times for each --tp.
    #[arg(long, value_name = "SRC")]
    pub source: Option<PathBuf>,
    /// Numbers of ranks for the conversion.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,8",
        value_parser = clap::value_parser!(u32).range(1..))]
    pub tp: Vec<u32>,
    /// Number of threads for the conversion. Default: one per CPU.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub threads: usize,
    /// Print one JSON document.
    #[arg(long)]
    pub json: bool,
}

/// `ggshard devices`
#[derive(Debug, clap::Args)]
pub struct Devices {
    /// Print one JSON document.
    #[arg(long)]
    pub json: bool,
}

/// `ggshard mappings`, `ggshard profiles`, `ggshard policies`
#[derive(Debug, clap::Args)]
pub struct Library {
    /// The one to show: a built-in name or a TOML file.
    pub name: Option<String>,
    /// Print one JSON document.
    #[arg(long)]
    pub json: bool,
}

/// Output types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DtypeArg {
    Bf16,
    F16,
    F32,
    /// E4M3 in blocks for linear projections, as DeepSeek publishes.
    Fp8,
    /// E2M1 in blocks for MLPs, experts and attention that is not latent, as NVIDIA publishes.
    Nvfp4,
    /// The source's own quantized blocks.
    Keep,
}

/// Float types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FloatArg {
    Bf16,
    F16,
    F32,
}

impl From<FloatArg> for FloatType {
    fn from(arg: FloatArg) -> Self {
        match arg {
            FloatArg::Bf16 => FloatType::BF16,
            FloatArg::F16 => FloatType::F16,
            FloatArg::F32 => FloatType::F32,
        }
    }
}

impl DtypeArg {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            DtypeArg::Bf16 => "bf16",
            DtypeArg::F16 => "f16",
            DtypeArg::F32 => "f32",
            DtypeArg::Fp8 => "fp8",
            DtypeArg::Nvfp4 => "nvfp4",
            DtypeArg::Keep => "keep",
        }
    }
}

/// What to do with MTP blocks.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum MtpArg {
    /// Keep them where the checkpoint has them.
    Keep,
    /// Leave them out.
    Drop,
    /// Leave the trunk's blocks out instead.
    Only,
}

impl From<MtpArg> for MtpPolicy {
    fn from(arg: MtpArg) -> Self {
        match arg {
            MtpArg::Keep => MtpPolicy::Keep,
            MtpArg::Drop => MtpPolicy::Drop,
            MtpArg::Only => MtpPolicy::Only,
        }
    }
}

/// Ranks as typed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranks(pub Vec<u32>);

fn ranks(text: &str) -> Result<Ranks, String> {
    let number = |t: &str| t.trim().parse::<u32>().map_err(|_| format!("'{t}' is no rank"));
    let mut ranks = Vec::new();
    for item in text.split(',') {
        let (first, last) = match item.split_once('-') {
            None => (number(item)?, number(item)?),
            Some((a, b)) => (number(a)?, number(b)?),
        };
        if last < first || last - first > 100_000 {
            return Err(format!("'{item}' is no range of ranks"));
        }
        ranks.extend(first..=last);
    }
    ranks.sort_unstable();
    ranks.dedup();
    Ok(Ranks(ranks))
}

fn cuda_devices(text: &str) -> Result<Device, String> {
    match text.parse()? {
        Device::Cpu | Device::Auto => Err(format!("'{text}' is no CUDA device; write cuda, cuda:0 or cuda:0,1")),
        Device::Cuda(ordinals) => Ok(Device::Cuda(ordinals)),
    }
}

fn max_rms(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| format!("'{text}' is no number from 0 up"))
}

fn size(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(format!("'{text}' is no size; write 5G, 500M or 1GB")),
    };
    digits
        .parse::<u64>()
        .ok()
        .and_then(|n| n.checked_mul(factor))
        .filter(|n| *n > 0)
        .ok_or_else(|| format!("'{text}' is no size"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_ranks_are_read_as_written() {
        assert_eq!(size("5G"), Ok(5 << 30));
        assert_eq!(size("1500"), Ok(1500));
        assert_eq!(size("2GB"), Ok(2_000_000_000));
        assert!(size("0").is_err() && size("G").is_err() && size("5X").is_err() && size("99999999999T").is_err());
        assert_eq!(ranks("0,2-4"), Ok(Ranks(vec![0, 2, 3, 4])));
        assert!(ranks("").is_err() && ranks("3-1").is_err() && ranks("a").is_err() && ranks("0-4000000000").is_err());
    }

    #[test]
    fn a_tolerance_is_a_number() {
        assert_eq!(max_rms("0.01"), Ok(0.01));
        assert!(max_rms("-1").is_err() && max_rms("nan").is_err() && max_rms("inf").is_err() && max_rms("x").is_err());
    }

    #[test]
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }
}
