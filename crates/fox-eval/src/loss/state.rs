//! State file from which a stopped evaluation resumes.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::LossSums;
use crate::files::write_whole;
use crate::{Error, Result};

/// Writing all sums after every document would cost more than short documents themselves.
const BETWEEN_SAVES: Duration = Duration::from_secs(10);

#[derive(Serialize, Deserialize)]
struct Contents {
    evaluation: String,
    sums: LossSums,
}

pub(super) struct StateFile {
    path: Option<PathBuf>,
    contents: Contents,
    saved: Instant,
}

impl StateFile {
    /// Reads the state, or starts a new one. Without a path nothing is ever written.
    pub(super) fn open(path: Option<&Path>, evaluation: String, length: usize) -> Result<Self> {
        let fresh = |evaluation| Contents { evaluation, sums: LossSums::new(length) };
        let Some(path) = path else {
            return Ok(StateFile {
                path: None,
                contents: fresh(evaluation),
                saved: Instant::now(),
            });
        };
        let contents = match fs::read(path) {
            Ok(bytes) => read(path, &bytes, &evaluation)?.unwrap_or_else(|| fresh(evaluation)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => fresh(evaluation),
            Err(e) => return Err(Error::io("read", path)(e)),
        };
        Ok(StateFile { path: Some(path.to_path_buf()), contents, saved: Instant::now() })
    }

    pub(super) fn take_sums(&mut self) -> LossSums {
        let length = self.contents.sums.length();
        std::mem::replace(&mut self.contents.sums, LossSums::new(length))
    }

    pub(super) fn save_now_and_then(&mut self, sums: &LossSums) -> Result<()> {
        if self.saved.elapsed() < BETWEEN_SAVES { Ok(()) } else { self.save(sums) }
    }

    pub(super) fn save(&mut self, sums: &LossSums) -> Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let contents =
            Contents { evaluation: self.contents.evaluation.clone(), sums: sums.clone() };
        let text = serde_json::to_vec(&contents)
            .map_err(|e| Error::BadFile { path: path.clone(), detail: e.to_string() })?;
        write_whole(path, &text)?;
        self.saved = Instant::now();
        Ok(())
    }
}

/// The state in a file; `None` for that of another evaluation (model, data or length), which is measured again.
fn read(path: &Path, bytes: &[u8], expected: &str) -> Result<Option<Contents>> {
    let bad = |detail: String| Error::BadFile { path: path.to_path_buf(), detail };
    let contents: Contents = serde_json::from_slice(bytes)
        .map_err(|e| bad(format!("not the state of an evaluation ({e}); remove it")))?;
    if contents.evaluation != expected {
        return Ok(None);
    }
    if !contents.sums.is_consistent() {
        return Err(bad("the sums do not fit together; remove it".into()));
    }
    Ok(Some(contents))
}
