//! The picture of a plan: it shows every parameter once, agrees with the plan, and lets no name become markup.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use ggshard::convert::{self, Planned, Request};
use ggshard::plan::Plan;
use serde_json::Value;

const MODELS: [&str; 2] = ["models/glm_moe_dsa-UD-IQ2_XXS.gguf", "models/deepseek_v3-split"];
const FULL_SCALE: &str = "container/plan/glm-5-744b-q4_k_m.header.gguf";
const MOST_BYTES: usize = 5_000_000;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

fn planned(name: &str, profile: &str, tp: u32, header_only: bool) -> Planned {
    let request = Request { profile: profile.into(), tp, ..Request::default() };
    convert::plan(&fixture(name), &request, header_only).unwrap()
}

/// The text between the tags of the element that holds the data.
fn data(page: &str) -> &str {
    let (_, rest) = page.split_once("<script type=\"application/json\" id=\"plan\">").unwrap();
    rest.split_once("</script>").unwrap().0
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
}

/// Bytes by set, stage and rank.
type Bytes = BTreeMap<(String, u64, u64), u64>;

/// Every parameter's name, put together as the page does it, and the bytes of each rank of each stage of each set.
fn shown(picture: &Value) -> (Vec<(String, String)>, Bytes) {
    let tp = picture["summary"]["tp"].as_u64().unwrap();
    let (mut names, mut bytes) = (Vec::new(), Bytes::new());
    for section in picture["sections"].as_array().unwrap() {
        let set = section["set"].as_str().unwrap();
        for row in section["rows"].as_array().unwrap() {
            let stage = row["stage"].as_u64().unwrap();
            let start = row["prefix"].as_str().unwrap().to_owned();
            let start = start + &row.get("number").map(Value::to_string).unwrap_or_default();
            for cell in row["cells"].as_array().unwrap() {
                let column = cell.get("column").map(|c| &section["columns"][c.as_u64().unwrap() as usize]);
                let head = column.map_or("", |c| c["head"].as_str().unwrap());
                let tail = column.and_then(|c| c.get("tail")).map(|t| t.as_str().unwrap());
                for group in cell["groups"].as_array().unwrap() {
                    let before = names.len();
                    match (tail, group.get("experts")) {
                        (Some(tail), Some(runs)) => {
                            for run in runs.as_array().unwrap() {
                                let run = numbers(run);
                                let name = |e| (set.to_owned(), format!("{start}{head}{e}{tail}"));
                                names.extend((run[0]..=run[1]).map(name));
                            }
                        }
                        (None, None) => names.push((set.to_owned(), format!("{start}{head}"))),
                        other => panic!("{other:?}"),
                    }
                    assert_eq!((names.len() - before) as u64, group["count"].as_u64().unwrap());
                    let held = numbers(&group["bytes"]);
                    for rank in 0..tp {
                        let sum = bytes.entry((set.to_owned(), stage, rank)).or_default();
                        *sum += if held.len() == 1 { held[0] } else { held[rank as usize] };
                    }
                }
            }
        }
    }
    (names, bytes)
}

/// Compares a page with its plan.
fn check(plan: &Plan, page: &str) {
    let picture: Value = serde_json::from_str(data(page)).unwrap();
    let (names, bytes) = shown(&picture);
    assert_eq!(names.len(), plan.params.len());
    let set = |p: &ggshard::plan::Param| if p.set == ggshard::mapping::Set::Main { "main" } else { "mtp" }.to_owned();
    let wanted: BTreeSet<(String, String)> = plan.params.iter().map(|p| (set(p), p.name.clone())).collect();
    assert_eq!(names.iter().cloned().collect::<BTreeSet<_>>(), wanted);
    let mut planned = Bytes::new();
    for param in &plan.params {
        for (rank, slice) in param.slices.iter().enumerate() {
            *planned.entry((set(param), param.stage.into(), rank as u64)).or_default() +=
                plan.slice_bytes(param, slice);
        }
    }
    assert_eq!(bytes, planned);
    for (rank, by_cut) in
        picture["summary"]["ranks"].as_array().unwrap().iter().zip(picture["by_cut"].as_array().unwrap())
    {
        let key =
            (rank["set"].as_str().unwrap().to_owned(), rank["stage"].as_u64().unwrap(), rank["rank"].as_u64().unwrap());
        let cut: u64 = by_cut.as_object().unwrap().values().map(|b| b.as_u64().unwrap()).sum();
        assert_eq!((rank["bytes"].as_u64().unwrap(), cut), (planned[&key], planned[&key]));
    }
}

#[test]
fn every_parameter_is_in_one_cell_and_bytes_are_those_of_the_plan() {
    for model in MODELS {
        for profile in ["hf", "vllm-0.32"] {
            let Planned { plan, mapping, .. } = planned(model, profile, 2, false);
            let page = plan.picture("a model", &mapping.chosen).to_html();
            check(&plan, &page);
            assert_eq!(page, plan.picture("a model", &mapping.chosen).to_html());
        }
    }
}

#[test]
fn stages_and_whole_experts_are_shown() {
    let request = Request { profile: "vllm-0.32".into(), tp: 2, pp: 2, expert_parallel: true, ..Request::default() };
    let Planned { plan, mapping, .. } = convert::plan(&fixture(MODELS[0]), &request, false).unwrap();
    let page = plan.picture("", &mapping.chosen).to_html();
    check(&plan, &page);
    assert!(data(&page).contains("\"cut\":\"expert\""));
}

#[test]
fn the_full_scale_page_is_small() {
    for profile in ["hf", "vllm-0.32"] {
        let Planned { plan, mapping, .. } = planned(FULL_SCALE, profile, 8, true);
        let page = plan.picture("GLM-5", &mapping.chosen).to_html();
        assert!(page.len() < MOST_BYTES, "{} bytes", page.len());
        check(&plan, &page);
    }
}

#[test]
fn names_from_files_never_become_markup() {
    const HOSTILE: &str = "</script><script>alert(1)</script><!--<img src=x onerror='a(\"&\")'>\u{2028}@PLAN@";
    let Planned { mut plan, .. } = planned(MODELS[0], "vllm-0.32", 2, false);
    let plain = plan.picture("", "").to_html();
    plan.params[0].name = HOSTILE.into();
    plan.params[3].name = format!("model.layers.0.{HOSTILE}.experts.5.{HOSTILE}");
    plan.sources[0].name = HOSTILE.into();
    plan.model.warnings.push(HOSTILE.into());
    plan.model.class = HOSTILE.into();
    let page = plan.picture(HOSTILE, HOSTILE).to_html();
    let inner = data(&page);
    for c in ['<', '>', '&', '\'', '\u{2028}'] {
        assert!(!inner.contains(c), "{c:?}");
    }
    let outside = |page: &str| page.replacen(data(page), "", 1);
    assert_eq!(outside(&page), outside(&plain));
    let picture: Value = serde_json::from_str(inner).unwrap();
    assert_eq!(picture["name"], HOSTILE);
    check(&plan, &page);
}

#[test]
fn the_page_asks_the_network_for_nothing() {
    let Planned { plan, .. } = planned(MODELS[1], "hf", 1, false);
    let page = plan.picture("", "").to_html();
    for way in ["http:", "https:", "src=", "@import", "url(", "innerHTML", "fetch("] {
        assert!(!page.contains(way), "{way}");
    }
    assert!(page.contains("default-src 'none'"));
}

#[test]
fn the_command_writes_the_page_whole_or_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.html");
    std::fs::write(&path, "old").unwrap();
    let plan = |html: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ggshard"));
        command.arg("plan").arg(fixture(MODELS[0])).args(["--tp", "2", "--html"]).arg(html);
        command
    };
    plan(&path).assert().success();
    let page = std::fs::read_to_string(&path).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"));
    let picture: Value = serde_json::from_str(data(&page)).unwrap();
    assert_eq!(picture["summary"]["tp"], 2);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    let absent = folder.path().join("absent").join("plan.html");
    for wrong in [folder.path(), &absent] {
        let output = plan(wrong).assert().failure().get_output().clone();
        assert!(String::from_utf8(output.stderr).unwrap().contains(wrong.to_str().unwrap()));
        assert!(output.stdout.is_empty());
    }
}
