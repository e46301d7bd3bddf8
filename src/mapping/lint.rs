//! What can be wrong with rules before any file is seen.

use std::collections::BTreeSet;

use super::rules::{CutRule, DimSource, ExprText, From, OneOrMany, Rules, Source, WeightRule};

/// Most weight and ignore rules that a mapping may have, and most sources that they may name: each is compared with every
/// other.
const MOST_RULES: usize = 1 << 12;
/// Most sources that are interleaved to one weight.
const MOST_PARTS: usize = 16;

/// Most dimensions.
const MOST_DIMS: usize = 1 << 10;

impl Rules {
    /// What can be wrong with rules before any file is seen: two rules for one name, names that nothing defines,
    /// shapes and cuts that do not go together.
    pub fn check(&self) -> Result<(), String> {
        self.check_counts()?;
        if let Some(sidecar) = self.sidecars.iter().find(|s| !s.suffix.starts_with('.') || s.suffix == ".weight") {
            return Err(format!("sidecar suffix '{}': it begins with `.` and is not `.weight`", sidecar.suffix));
        }
        for rule in &self.weights {
            self.check_weight(rule).map_err(|e| format!("weight '{}': {e}", rule.name.0.text()))?;
        }
        for (i, a) in self.weights.iter().enumerate() {
            if let Some(b) = self.weights[..i].iter().find(|b| a.name.0.overlaps(&b.name.0)) {
                return Err(format!("two rules for one weight: '{}' and '{}'", b.name.0.text(), a.name.0.text()));
            }
        }
        self.check_sources()?;
        self.check_names()?;
        self.check_circles()?;
        if let Some(name) = self.dims.keys().find(|n| self.loops.contains_key(*n)) {
            return Err(format!("'{name}' is both a dimension and a loop variable"));
        }
        for (name, group) in &self.groups {
            if let Some(dim) = group.declared.as_ref().filter(|d| !self.dims.contains_key(*d)) {
                return Err(format!("group '{name}' is declared by '{dim}', which is no dimension"));
            }
        }
        if self.every_tensor && !self.weights.is_empty() {
            return Err("`every_tensor` leaves no room for weight rules".into());
        }
        Ok(())
    }

    /// Refuses what would take long to compare. Asked of each text before rules are laid over each other, too.
    pub(super) fn check_counts(&self) -> Result<(), String> {
        let sources = self.weights.iter().flat_map(|w| w.from.as_slice()).map(|f| f.sources().len()).sum();
        let lists = [
            ("rules", self.weights.len() + self.ignores.len() + self.remove.len()),
            ("sources", sources),
            ("sidecars", self.sidecars.len()),
            ("checks", self.checks.len()),
        ];
        for (what, count) in lists {
            if count > MOST_RULES {
                return Err(format!("{count} {what}; at most {MOST_RULES} are read"));
            }
        }
        if self.dims.len() > MOST_DIMS {
            return Err(format!("{} dimensions; at most {MOST_DIMS} are read", self.dims.len()));
        }
        Ok(())
    }

    fn check_weight(&self, rule: &WeightRule) -> Result<(), String> {
        let bound = rule.name.0.variables();
        if rule.name.0.is_open() {
            return Err("a weight's name cannot hold `*`".into());
        }
        if let Some(unknown) = bound.iter().find(|v| !self.loops.contains_key(**v)) {
            return Err(format!("'{{{unknown}}}' is no loop; [loops] has {}", list(self.loops.keys())));
        }
        if let Some(group) = rule.group.as_ref().filter(|g| !self.groups.contains_key(*g)) {
            return Err(format!("group '{group}' is not in [groups]"));
        }
        if rule.group.is_some() && !bound.contains(&"layer") {
            return Err("a group counts per block: the name needs `{layer}`".into());
        }
        if rule.shape.is_empty() {
            return Err("a weight has at least one axis".into());
        }
        if let CutRule::Units(units) = &rule.cut {
            if units.column.is_some() == units.row.is_some() {
                return Err("a cut between units names `column` or `row`, one of them".into());
            }
            if units.repeat && units.row.is_some() {
                return Err("only column cuts repeat units".into());
            }
        }
        if rule.from.as_slice().is_empty() {
            return Err("`from` is empty".into());
        }
        for from in rule.from.as_slice() {
            let parts = from.sources();
            if parts.is_empty() {
                return Err("`parts` is empty".into());
            }
            if parts.len() > MOST_PARTS {
                return Err(format!("{} parts; at most {MOST_PARTS} are interleaved", parts.len()));
            }
            for source in parts {
                check_source(source, &bound, matches!(from, From::Interleaved(_)))?;
            }
            for (n, part) in parts.iter().enumerate() {
                if parts[..n].iter().any(|p| p.rows.is_none() && p.gguf.0.overlaps(&part.gguf.0)) {
                    return Err(format!("source '{}' is one of its parts twice", part.gguf.0.text()));
                }
            }
        }
        Ok(())
    }

    /// No source tensor may be claimed twice, except by rules that each take a row range of it, and none may be both
    /// used and ignored unless the ignore rule has a condition.
    fn check_sources(&self) -> Result<(), String> {
        let used: Vec<(usize, &Source)> = self
            .weights
            .iter()
            .enumerate()
            .flat_map(|(i, w)| w.from.as_slice().iter().map(move |f| (i, f)))
            .flat_map(|(i, f)| f.sources().iter().map(move |s| (i, s)))
            .collect();
        for (n, (i, a)) in used.iter().enumerate() {
            for (j, b) in &used[..n] {
                let ranges = a.rows.is_some() && b.rows.is_some();
                if i != j && !ranges && a.gguf.0.overlaps(&b.gguf.0) {
                    return Err(format!(
                        "two rules for one tensor: '{}' is taken by weight '{}' and by weight '{}'",
                        a.gguf.0.text(),
                        self.weights[*j].name.0.text(),
                        self.weights[*i].name.0.text()
                    ));
                }
            }
        }
        for (n, ignore) in self.ignores.iter().enumerate() {
            if let Some(other) = self.ignores[..n]
                .iter()
                .find(|o| o.gguf.0.overlaps(&ignore.gguf.0) && (o.when.is_none() || ignore.when.is_none()))
            {
                return Err(format!(
                    "two ignore rules for one tensor: '{}' and '{}'",
                    other.gguf.0.text(),
                    ignore.gguf.0.text()
                ));
            }
            if ignore.when.is_none()
                && let Some((i, _)) = used.iter().find(|(_, s)| s.gguf.0.overlaps(&ignore.gguf.0))
            {
                return Err(format!(
                    "two rules for one tensor: '{}' is ignored without a condition and taken by weight '{}'",
                    ignore.gguf.0.text(),
                    self.weights[*i].name.0.text()
                ));
            }
        }
        Ok(())
    }

    /// Every name in every expression is a dimension or a loop variable that has a value there.
    fn check_names(&self) -> Result<(), String> {
        let known = |expr: &ExprText, bound: &[&str]| {
            let defined = |name: &String| self.dims.contains_key(name) || bound.contains(&name.as_str());
            match expr.0.names().into_iter().find(|name| !defined(name)) {
                None => Ok(()),
                Some(name) if self.loops.contains_key(&name) => {
                    Err(format!("`{}` uses '{{{name}}}', which has no value here", expr.0.text()))
                }
                Some(name) => {
                    Err(format!("`{}` uses '{name}', which is neither a dimension nor a loop variable", expr.0.text()))
                }
            }
        };
        let at = |what: String| move |why: String| format!("{what}: {why}");
        for (name, sources) in &self.dims {
            for source in sources.as_slice() {
                match source {
                    DimSource::Expr(expr) => known(expr, &[]).map_err(at(format!("dimension '{name}'")))?,
                    DimSource::Constant(_) | DimSource::Key { .. } | DimSource::Axis { .. } => {}
                }
            }
        }
        for (name, count) in &self.loops {
            known(count, &["layer"]).map_err(at(format!("loop '{name}'")))?;
        }
        for expr in self.blocks.iter().flat_map(|b| [&b.count, &b.trunk]) {
            known(expr, &[]).map_err(at("blocks".into()))?;
        }
        for check in &self.checks {
            known(&check.that, &["layer"]).map_err(at("check".into()))?;
        }
        for ignore in &self.ignores {
            if let Some(expr) = &ignore.when {
                known(expr, &ignore.gguf.0.variables()).map_err(at(format!("ignore '{}'", ignore.gguf.0.text())))?;
            }
        }
        if let Some(expr) = self.matching.as_ref().and_then(|m| m.when.as_ref()) {
            known(expr, &[]).map_err(at("match".into()))?;
        }
        for (name, field) in &self.config.0 {
            field.each_expr(&mut |expr, layer| {
                let bound: &[&str] = if layer { &["layer", "mtp_written"] } else { &["mtp_written"] };
                known(expr, bound).map_err(at(format!("config.{name}")))
            })?;
        }
        for expr in self.config_unknown.iter().filter_map(|unknown| unknown.when.as_ref()) {
            known(expr, &["mtp_written"]).map_err(at("config_unknown".into()))?;
        }
        for rule in &self.weights {
            let bound = rule.name.0.variables();
            for expr in rule.expressions() {
                known(expr, &bound).map_err(at(format!("weight '{}'", rule.name.0.text())))?;
            }
        }
        Ok(())
    }

    /// No dimension is computed from itself.
    fn check_circles(&self) -> Result<(), String> {
        // Dimensions whose needs are known to end, and those on the way from one that is being followed.
        let (mut done, mut open) = (BTreeSet::new(), BTreeSet::new());
        for name in self.dims.keys() {
            let mut path: Vec<(&str, Vec<&str>)> = Vec::new();
            let mut next = Some(name.as_str());
            loop {
                if let Some(name) = next.filter(|name| !done.contains(name)) {
                    if !open.insert(name) {
                        return Err(format!("dimension '{name}' is computed from itself"));
                    }
                    path.push((name, self.needs(name)));
                }
                let Some((name, needs)) = path.last_mut() else { break };
                next = needs.pop();
                if next.is_none() {
                    open.remove(name);
                    done.insert(*name);
                    path.pop();
                }
            }
        }
        Ok(())
    }

    /// The dimensions that a dimension is computed from.
    fn needs(&self, name: &str) -> Vec<&str> {
        let sources = self.dims.get(name).map(OneOrMany::as_slice).unwrap_or_default();
        let exprs = sources.iter().filter_map(|s| match s {
            DimSource::Expr(expr) => Some(expr),
            DimSource::Constant(_) | DimSource::Key { .. } | DimSource::Axis { .. } => None,
        });
        let names: BTreeSet<String> = exprs.flat_map(|e| e.0.names()).collect();
        names.iter().filter_map(|n| self.dims.get_key_value(n)).map(|(n, _)| n.as_str()).collect()
    }
}

impl WeightRule {
    /// Its own expressions and those of all its sources.
    fn expressions(&self) -> Vec<&ExprText> {
        let mut all: Vec<&ExprText> = self.when.iter().chain(&self.shape).collect();
        match &self.cut {
            CutRule::Plain(_) => {}
            CutRule::Units(units) => all.extend(units.column.iter().chain(&units.row)),
        }
        for from in self.from.as_slice() {
            all.extend(from.expressions());
        }
        all
    }

    /// Whether its outcome depends on a loop variable other than by unstacking and in its name.
    pub(super) fn depends_on(&self, variable: &str) -> bool {
        let named = |from: &From| from.sources().iter().any(|s| s.gguf.0.variables().contains(&variable));
        self.from.as_slice().iter().any(named) || self.expressions().iter().any(|e| e.0.names().contains(variable))
    }
}

impl From {
    /// The sources in order.
    pub(super) fn sources(&self) -> &[Source] {
        match self {
            From::One(source) => std::slice::from_ref(source),
            From::Interleaved(interleaved) => &interleaved.parts,
        }
    }

    fn expressions(&self) -> Vec<&ExprText> {
        let per = match self {
            From::One(_) => None,
            From::Interleaved(interleaved) => Some(&interleaved.per),
        };
        per.into_iter().chain(self.sources().iter().flat_map(Source::expressions)).collect()
    }
}

impl Source {
    fn expressions(&self) -> impl Iterator<Item = &ExprText> {
        self.shape.iter().flatten().chain(self.rows.iter().flatten()).chain(&self.unpermute)
    }
}

fn check_source(source: &Source, bound: &[&str], interleaved: bool) -> Result<(), String> {
    let text = source.gguf.0.text();
    if source.gguf.0.is_open() {
        return Err(format!("source '{text}' cannot hold `*`"));
    }
    if let Some(unknown) = source.gguf.0.variables().iter().find(|v| !bound.contains(*v)) {
        return Err(format!("source '{text}' uses '{{{unknown}}}', which the weight's name does not"));
    }
    if let Some(unknown) = source.unstack.as_ref().filter(|v| !bound.contains(&v.as_str())) {
        return Err(format!("source '{text}' is unstacked by '{unknown}', which the weight's name does not use"));
    }
    if interleaved && source.shape.is_none() {
        return Err(format!("source '{text}' is one of several parts and must state its shape"));
    }
    if source.rows.is_some() && source.shape.is_none() {
        return Err(format!("source '{text}' is taken by a row range and must state its shape"));
    }
    if source.transpose && source.unpermute.is_some() {
        return Err(format!("source '{text}': `transpose` and `unpermute` do not go together"));
    }
    if source.unpermute.is_some() && interleaved {
        return Err(format!("source '{text}': `unpermute` applies to a source of its own"));
    }
    if source.add.is_some_and(|x| !x.is_finite()) {
        return Err(format!("source '{text}': `add` must be finite"));
    }
    Ok(())
}

fn list<'a>(names: impl Iterator<Item = &'a String>) -> String {
    let names: Vec<&str> = names.map(String::as_str).collect();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}
