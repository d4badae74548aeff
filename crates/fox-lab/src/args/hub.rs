//! Models by name: `ORG/NAME` or `ORG/NAME@REVISION` of Hugging Face, in the local cache of its tools.
//!
//! ```text
//! models--ORG--NAME/refs/main              the commit of the branch
//! models--ORG--NAME/snapshots/COMMIT/...   links to files
//! ```

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
#[cfg(not(feature = "download"))]
use anyhow::bail;

/// A model of Hugging Face.
#[derive(Clone, Debug, PartialEq)]
pub struct HubModel {
    org: String,
    name: String,
    revision: String,
}

impl HubModel {
    /// The model that an argument names; `None` for an existing path and for what is not a name.
    pub fn parse(argument: &str) -> Option<HubModel> {
        if Path::new(argument).exists() {
            return None;
        }
        let (id, revision) = argument.split_once('@').unwrap_or((argument, "main"));
        let (org, name) = id.split_once('/')?;
        let is_word = |word: &str| {
            let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            !word.is_empty() && !word.starts_with('.') && word.chars().all(allowed)
        };
        let is_model = is_word(org) && is_word(name) && is_word(revision);
        is_model.then(|| HubModel { org: org.into(), name: name.into(), revision: revision.into() })
    }

    /// Its folder in the cache, if it is there and complete.
    pub fn cached(&self) -> Option<PathBuf> {
        self.cached_in(&cache()?)
    }

    fn cached_in(&self, cache: &Path) -> Option<PathBuf> {
        let folder = cache.join(format!("models--{}--{}", self.org, self.name));
        let branch = fs::read_to_string(folder.join("refs").join(&self.revision));
        let commit = branch.as_deref().map_or(self.revision.as_str(), str::trim);
        // The name of a commit must not lead out of the folder.
        let is_commit = !commit.is_empty() && commit.chars().all(|c| c.is_ascii_alphanumeric());
        let snapshot = folder.join("snapshots").join(commit);
        (is_commit && snapshot.join("config.json").is_file()).then_some(snapshot)
    }

    /// Fetches the model into the cache, unless it is there. An interrupted download resumes.
    ///
    /// # Errors
    /// A build without the feature `download`, a model that is not reached, and one whose weights are not safetensors.
    #[cfg(not(feature = "download"))]
    pub fn download(&self) -> Result<()> {
        if self.cached().is_some() {
            return Ok(());
        }
        let id = format!("{}/{}", self.org, self.name);
        bail!(
            "this build cannot download {id}; fetch it with `hf download {id}`, or build fox with `--features download`"
        )
    }

    /// Fetches the model into the cache, unless it is there. An interrupted download resumes.
    ///
    /// # Errors
    /// A model that is not reached, and one whose weights are not safetensors.
    #[cfg(feature = "download")]
    pub fn download(&self) -> Result<()> {
        match self.cached() {
            Some(_) => Ok(()),
            None => download::fetch(self),
        }
    }
}

/// The cache of Hugging Face's tools: `HF_HUB_CACHE`, or `hub` in `HF_HOME`, or that of the user.
pub fn cache() -> Option<PathBuf> {
    let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
    if let Some(cache) = variable("HF_HUB_CACHE") {
        return Some(cache.into());
    }
    if let Some(home) = variable("HF_HOME") {
        return Some(PathBuf::from(home).join("hub"));
    }
    let user = variable("XDG_CACHE_HOME").map(PathBuf::from);
    let user = user.or_else(|| Some(env::home_dir()?.join(".cache")))?;
    Some(user.join("huggingface/hub"))
}

#[cfg(feature = "download")]
mod download {
    use std::env;
    use std::io::{IsTerminal, stderr};
    use std::path::PathBuf;

    use anyhow::{Context, Result, bail};
    use hf_hub::api::sync::ApiBuilder;
    use hf_hub::{Cache, Repo, RepoType};

    use super::HubModel;
    use crate::output;

    const CONFIG: &str = "config.json";
    const ENDPOINT: &str = "https://huggingface.co";
    /// Tries of a download that breaks off.
    const RETRIES: usize = 5;
    /// Prefixes of the files besides weights and configuration.
    #[rustfmt::skip]
    const COMPANIONS: [&str; 9] = [
        "added_tokens.json", "chat_template.", "fox_tokenizer.json", "generation_config.json",
        "merges.txt", "model.safetensors.index.json", "special_tokens_map.json", "tokenizer",
        "vocab.",
    ];

    pub(super) fn fetch(model: &HubModel) -> Result<()> {
        let id = format!("{}/{}", model.org, model.name);
        let variable = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        if variable("HF_HUB_OFFLINE").is_some_and(|value| value != "0") {
            bail!("HF_HUB_OFFLINE is set, and {id} is not in the cache; unset it to download");
        }
        let cache = super::cache().context("the home folder is unknown; set HF_HOME")?;
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        let cache = Cache::new(cache);
        let token = variable("HF_TOKEN").or_else(|| cache.token());
        let api = ApiBuilder::from_cache(cache)
            .with_endpoint(endpoint.clone())
            .with_token(token)
            .with_retries(RETRIES)
            .with_progress(stderr().is_terminal())
            .build()?;
        let repo = Repo::with_revision(id.clone(), RepoType::Model, model.revision.clone());
        let repo = api.repo(repo);
        let failed = || {
            format!(
                "cannot download {id} from {endpoint}; check name and network, and set HF_TOKEN for a gated model"
            )
        };
        let info = repo.info().with_context(failed)?;
        // Names in folders are not needed, and must not lead out of the cache.
        let names: Vec<String> = info.siblings.into_iter().map(|file| file.rfilename).collect();
        let plain = names.iter().map(String::as_str).filter(|name| !name.contains(['/', '\\']));
        let is_weights = |name: &str| name.starts_with("model") && name.ends_with(".safetensors");
        let weights: Vec<&str> = plain.clone().filter(|name| is_weights(name)).collect();
        if weights.is_empty() {
            if plain.clone().any(|name| name.starts_with("pytorch_model")) {
                return Err(fox_model::Error::PickledWeights { dir: PathBuf::from(&id) }.into());
            }
            bail!("{id} has no model.safetensors; choose another model");
        }
        if !names.iter().any(|name| name == CONFIG) {
            bail!("{id} has no config.json; choose another model");
        }
        let companions =
            plain.filter(|name| COMPANIONS.iter().any(|prefix| name.starts_with(prefix)));
        // config.json comes last: a folder that has it is complete.
        for name in companions.chain(weights.iter().copied()).chain([CONFIG]) {
            output::note(&format!("downloading {id}: {name}"));
            repo.get(name).with_context(failed)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_names_of_models() {
        let parse = |text| HubModel::parse(text).map(|m| [m.org, m.name, m.revision].join(" "));
        assert_eq!(parse("Qwen/Qwen3-0.6B").as_deref(), Some("Qwen Qwen3-0.6B main"));
        assert_eq!(parse("a/b@v1.0").as_deref(), Some("a b v1.0"));
        for other in ["gpt2", "/a/b", "a/b/c", "../b", "a/..", "a/b@", "a/b c", "", "a/", "./b"] {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    #[test]
    fn finds_snapshots_by_branch_and_commit() {
        let cache = tempfile::tempdir().unwrap();
        let folder = cache.path().join("models--a--b");
        let snapshot = folder.join("snapshots/c0ffee");
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(folder.join("refs")).unwrap();
        fs::write(folder.join("refs/main"), "c0ffee\n").unwrap();
        fs::write(folder.join("refs/evil"), "../../../x").unwrap();
        let find = |name: &str| HubModel::parse(name).unwrap().cached_in(cache.path());
        assert_eq!(find("a/b"), None, "without config.json it is incomplete");
        fs::write(snapshot.join("config.json"), "{}").unwrap();
        assert_eq!(find("a/b"), Some(snapshot.clone()));
        assert_eq!(find("a/b@c0ffee"), Some(snapshot));
        for absent in ["a/c", "a/b@other", "a/b@evil"] {
            assert_eq!(find(absent), None, "{absent}");
        }
    }
}
