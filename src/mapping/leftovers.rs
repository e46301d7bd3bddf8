//! Source tensors that no weight uses: ignored by a rule with a reason, or an error that says what keeps them unused.

use super::Ignored;
use super::facts::Bound;
use super::resolve::{Resolver, Vars};
use super::rules::{SidecarRole, WeightRule};
use crate::error::Result;

impl Resolver<'_> {
    /// Every tensor must be used whole, or ignored by a rule.
    pub(super) fn leftovers(&self) -> Result<Vec<Ignored>> {
        let mut ignored: Vec<Ignored> = Vec::new();
        let mut unknown: Vec<&str> = Vec::new();
        for (index, (tensor, used)) in self.set.tensors().iter().zip(&self.uses).enumerate() {
            if used.used && used.elements == tensor.elements() {
                continue;
            }
            if used.used {
                let found = format!("weights take {} of its {} elements", used.elements, tensor.elements());
                return Err(self
                    .facts
                    .fault(found)
                    .tensor(&tensor.name)
                    .expected("each element to be taken once")
                    .remedy("The file holds some weights twice, or the mapping's row ranges leave a gap")
                    .contradiction());
            }
            match self.reason(&tensor.name)? {
                Some(reason) => ignored.push(Ignored { source: index as u32, reason }),
                None => unknown.push(&tensor.name),
            }
        }
        let Some(first) = unknown.first() else { return Ok(ignored) };
        let shown: Vec<&str> = unknown.iter().take(8).copied().collect();
        let more = unknown.len() - shown.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let total = self.set.tensors().len();
        Err(self
            .facts
            .fault(format!(
                "{} of {total} tensors have no use in mapping '{}': {}{more}{}",
                unknown.len(),
                self.rules.name,
                shown.join(", "),
                self.why_unused(first).unwrap_or_default()
            ))
            .tensor(*first)
            .expected("every tensor to be used by a weight or ignored by a rule with a reason")
            .remedy("Add rules to a copy of the mapping (docs/add-a-model.md) and give it with --mapping")
            .unknown_tensor())
    }

    /// What keeps the rule that knows a tensor's name from using it.
    fn why_unused(&self, name: &str) -> Option<String> {
        self.rules.weights.iter().find_map(|rule| {
            let sources = rule.from.as_slice().iter().flat_map(|f| f.sources());
            let captured = sources.filter_map(|s| s.gguf.0.capture(name)).next()?;
            let vars: Vars = captured.iter().map(|(n, v)| (n.as_str(), *v)).collect();
            let weight = rule.name.0.text();
            Some(self.loop_ended(&vars).or_else(|| self.not_wanted(rule, &vars)).map_or_else(
                || format!(". Weight '{weight}' has another source in this file"),
                |why| format!(". Weight '{weight}' does not use it, because {why}"),
            ))
        })
    }

    fn loop_ended(&self, vars: &Vars) -> Option<String> {
        vars.iter().find_map(|(variable, round)| {
            let rounds = self.rounds(variable, vars).ok().filter(|n| round >= n)?;
            let scope = Bound { facts: self.facts, vars };
            let count = self.rules.loops.get(*variable)?;
            Some(scope.with_reasons(format!("there are {rounds} rounds of '{variable}'"), &count.0))
        })
    }

    fn not_wanted(&self, rule: &WeightRule, vars: &Vars) -> Option<String> {
        let scope = Bound { facts: self.facts, vars };
        let when = rule.when.as_ref().filter(|when| matches!(scope.truth(when), Ok(false)))?;
        Some(scope.with_reasons(format!("`{}` does not hold", when.0.text()), &when.0))
    }

    fn reason(&self, name: &str) -> Result<Option<String>> {
        if let Some(reason) = self.blocks.unwanted_reason(name) {
            return Ok(Some(reason));
        }
        for rule in &self.rules.ignores {
            let Some(vars) = rule.gguf.0.capture(name) else { continue };
            let vars: Vars = vars.iter().map(|(n, v)| (n.as_str(), *v)).collect();
            let broken = |why: String| self.facts.fault(why).tensor(name).contradiction();
            let applies = match &rule.when {
                None => true,
                Some(when) => Bound { facts: self.facts, vars: &vars }.truth(when).map_err(broken)?,
            };
            if applies {
                return Ok(Some(rule.reason.clone()));
            }
        }
        for sidecar in &self.rules.sidecars {
            let Some(stem) = name.strip_suffix(sidecar.suffix.as_str()) else { continue };
            let Some(owner) = self.set.find(&format!("{stem}.weight")) else { continue };
            match sidecar.role {
                SidecarRole::Ignore => return Ok(Some(sidecar.reason.clone())),
                // A scale whose owner is no weight goes the owner's way.
                SidecarRole::Scale if !self.uses[owner].used => return self.reason(&self.set.tensors()[owner].name),
                SidecarRole::Scale => {}
            }
        }
        Ok(None)
    }
}
