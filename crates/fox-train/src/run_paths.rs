//! Paths of a recipe in a run folder: relative to the folder inside of it and absolute elsewhere, so that a run can be
//! moved, copied and used from any working folder.

use std::path::{Path, PathBuf};

use crate::Recipe;

/// The recipe as it is written into `folder`.
pub(crate) fn stored(recipe: &Recipe, folder: &Path) -> Recipe {
    let mut recipe = recipe.clone();
    let folder = full(folder);
    for path in paths(&mut recipe) {
        let there = full(path);
        *path = there.strip_prefix(&folder).map(Path::to_path_buf).unwrap_or(there);
    }
    recipe
}

/// Makes the paths of a recipe that was read from `folder` usable here. In folders of earlier versions paths are
/// relative to the working folder of the run.
pub(crate) fn locate(recipe: &mut Recipe, folder: &Path) {
    for path in paths(recipe) {
        let inside = folder.join(&*path);
        if path.is_relative() && inside.exists() {
            *path = inside;
        }
    }
}

fn paths(recipe: &mut Recipe) -> impl Iterator<Item = &mut PathBuf> {
    let data = &mut recipe.data;
    let messages = data.messages.as_mut().map(|m| [Some(&mut m.path), m.heldout.as_mut()]);
    let own = [data.path.as_mut(), data.heldout.as_mut()];
    own.into_iter().chain(messages.into_iter().flatten()).flatten()
}

/// The absolute path, without links where it exists.
fn full(path: &Path) -> PathBuf {
    let absolute = || std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    path.canonicalize().unwrap_or_else(|_| absolute())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_follow_the_folder() {
        let place = tempfile::tempdir().unwrap();
        let (run, moved) = (place.path().join("run"), place.path().join("moved"));
        std::fs::create_dir_all(run.join("data")).unwrap();
        let mut recipe = crate::recipe::load("tiny-fox-pro", &[]).unwrap();
        recipe.data.path = Some(run.join("data"));
        recipe.data.heldout = Some(place.path().join("other"));
        let mut written = stored(&recipe, &run);
        assert_eq!(written.data.path.as_deref(), Some(Path::new("data")));
        assert!(written.data.heldout.as_ref().unwrap().is_absolute());
        std::fs::rename(&run, &moved).unwrap();
        locate(&mut written, &moved);
        assert_eq!(written.data.path, Some(moved.join("data")));
        assert_eq!(written.data.heldout, recipe.data.heldout);
    }
}
