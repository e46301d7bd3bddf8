//! Which blocks a file holds: the trunk, whole or wholly absent, and the multi-token-prediction (MTP) blocks after it.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::facts::{Bound, Facts};
use super::pattern;
use crate::error::Result;

/// Most blocks that a model may have.
const MOST_BLOCKS: u64 = 1 << 16;

/// What becomes of the MTP blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MtpPolicy {
    /// They stay where the checkpoint has them.
    #[default]
    Keep,
    /// They are left out.
    Drop,
    /// The trunk's blocks are left out: embeddings, final norm, output head and MTP blocks remain, as in files
    /// that are made of the MTP head alone.
    Only,
}

impl MtpPolicy {
    /// The policy's name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            MtpPolicy::Keep => "keep",
            MtpPolicy::Drop => "drop",
            MtpPolicy::Only => "only",
        }
    }
}

/// The blocks of a file.
#[derive(Debug, Default)]
pub struct BlockMap {
    present: BTreeSet<u64>,
    trunk: u64,
    count: u64,
    policy: MtpPolicy,
}

impl BlockMap {
    /// Counts the blocks in the metadata and in the tensor names, and refuses a broken trunk.
    pub fn read(facts: &Facts<'_>, policy: MtpPolicy, warnings: &mut Vec<String>) -> Result<Self> {
        let present: BTreeSet<u64> = facts.set().tensors().iter().filter_map(|t| block_of(&t.name)).collect();
        let Some(blocks) = &facts.rules().blocks else {
            return Ok(BlockMap { present, trunk: u64::MAX, count: 0, policy });
        };
        let scope = Bound { facts, vars: &[] };
        let broken = |why: String| facts.fault(why).contradiction();
        let count = scope.size(&blocks.count).map_err(broken)?;
        let trunk = scope.size(&blocks.trunk).map_err(broken)?;
        let explain = scope.explain([&blocks.count.0, &blocks.trunk.0]);
        if count > MOST_BLOCKS || trunk > count {
            let found =
                format!("{trunk} trunk blocks of {count} ({explain}); at most {MOST_BLOCKS} blocks are possible");
            return Err(broken(found));
        }
        let missing: Vec<u64> = (0..trunk).filter(|b| !present.contains(b)).collect();
        let mtp: Vec<u64> = (trunk..count).filter(|b| present.contains(b)).collect();
        if !missing.is_empty() && (missing.len() as u64) < trunk {
            return Err(facts
                .fault(format!(
                    "trunk block {} has no tensor ({} of {trunk} blocks are missing)",
                    list(&missing),
                    missing.len()
                ))
                .tensor(format!("blk.{}.*", missing[0]))
                .expected(format!("blocks 0 to {} of the trunk ({explain})", trunk.saturating_sub(1)))
                .remedy("The file is incomplete: get it again, or all parts of its split set")
                .missing_tensor());
        }
        if trunk > 0 && missing.len() as u64 == trunk && mtp.is_empty() {
            return Err(facts
                .fault(format!("the file holds none of the {trunk} trunk blocks and no MTP block ({explain})"))
                .tensor("blk.0.*")
                .remedy("It is a header, a tokenizer or a part on its own; give the whole model")
                .missing_tensor());
        }
        let absent: Vec<u64> = (trunk..count).filter(|b| !present.contains(b)).collect();
        if !absent.is_empty() {
            let blocks = list(&absent);
            warnings.push(format!(
                "the metadata counts MTP block {blocks} ({explain}), but the file holds no tensor of it"
            ));
        }
        if !missing.is_empty() {
            warnings.push(format!("the file holds the MTP blocks alone: none of the {trunk} trunk blocks is in it"));
        }
        if policy == MtpPolicy::Only && mtp.is_empty() {
            return Err(facts
                .fault(format!("--mtp only, but the file holds no MTP block ({explain})"))
                .remedy("DeepSeek-V2/V3 files never hold them; GLM files do unless they were made without")
                .missing_tensor());
        }
        Ok(BlockMap { present, trunk, count, policy })
    }

    /// The blocks of which the file holds a tensor.
    pub fn present(&self) -> impl Iterator<Item = u64> {
        self.present.iter().copied().filter(|b| *b < self.count)
    }

    /// Number of trunk blocks.
    pub fn trunk(&self) -> u64 {
        self.trunk
    }

    /// Whether a list of this length can have one value per block: of the trunk, or of all.
    pub fn can_be_listed(&self, length: u64) -> bool {
        self.trunk == u64::MAX || (self.trunk..=self.count).contains(&length)
    }

    /// Whether a block is one of the MTP blocks.
    pub fn is_mtp(&self, block: u64) -> bool {
        block >= self.trunk
    }

    /// Whether a block's weights are to be made. A block that nothing says may be absent is wanted, and must be there.
    pub fn wanted(&self, block: u64) -> bool {
        block >= self.count || (self.present.contains(&block) && self.chosen(block))
    }

    fn chosen(&self, block: u64) -> bool {
        match self.policy {
            MtpPolicy::Keep => true,
            MtpPolicy::Drop => !self.is_mtp(block),
            MtpPolicy::Only => self.is_mtp(block),
        }
    }

    /// Why the policy leaves a tensor out, if it does.
    pub fn unwanted_reason(&self, tensor: &str) -> Option<String> {
        let block = block_of(tensor).filter(|b| *b < self.count && !self.chosen(*b))?;
        Some(match self.policy {
            MtpPolicy::Keep | MtpPolicy::Drop => format!("block {block} is an MTP block, left out by --mtp drop"),
            MtpPolicy::Only => format!("block {block} is a trunk block, left out by --mtp only"),
        })
    }
}

/// The block number of a tensor named `blk.N.…`.
fn block_of(name: &str) -> Option<u64> {
    let rest = name.strip_prefix("blk.")?;
    let (number, _) = rest.split_once('.')?;
    pattern::number(number)
}

/// Numbers for a message, the first few of many.
fn list(numbers: &[u64]) -> String {
    let shown: Vec<String> = numbers.iter().take(6).map(u64::to_string).collect();
    if numbers.len() > 6 { format!("{}, …", shown.join(", ")) } else { shown.join(", ") }
}
