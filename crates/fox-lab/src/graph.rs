//! A graph of `fox` commands: training runs, and commands that need what those runs left.
//!
//! What a node leaves on the disk decides its state: a run folder with the summary of the same recipe, or the output of
//! a command. So a graph that is built again after an interruption continues where the last one stopped.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use fox_base::durable;
use fox_train::{Recipe, Summary, finished_run, recipe};

/// File in a run folder that says why the run diverged.
const DIVERGED: &str = "diverged.txt";
/// The exported model in a run folder.
pub(crate) const EXPORT: &str = "export";

/// How a node ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunOutcome {
    /// Its output is complete.
    Finished,
    /// Weights or gradients of a training run stayed non-finite; the error message.
    Diverged(String),
    /// It could not be executed; the error message.
    Failed(String),
}

/// Index of a node.
pub type NodeId = usize;

/// A training run: what `fox train` is given, and the folder it writes.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainRun {
    /// Name in progress lines and tables; unique in a graph.
    pub label: String,
    /// Name or file of the recipe, with variants.
    pub spec: String,
    /// `key=value` overrides.
    pub settings: Vec<String>,
    /// Prepared data; that of the recipe by default.
    pub data: Option<PathBuf>,
    /// Run folder.
    pub folder: PathBuf,
}

impl TrainRun {
    /// The recipe with its overrides.
    pub fn recipe(&self) -> Result<Recipe> {
        let mut recipe = recipe::load(&self.spec, &self.settings)?;
        if self.data.is_some() {
            recipe.data.path.clone_from(&self.data);
        }
        Ok(recipe)
    }

    /// The arguments of `fox train`.
    pub fn arguments(&self) -> Vec<String> {
        let mut arguments = vec!["train".to_string(), self.spec.clone()];
        for setting in &self.settings {
            arguments.extend(["--set".to_string(), setting.clone()]);
        }
        if let Some(path) = &self.data {
            arguments.extend(["--data".to_string(), path.display().to_string()]);
        }
        arguments.extend(["--out".to_string(), self.folder.display().to_string()]);
        arguments
    }

    /// How the run ended according to its folder; `None` for a run that has not ended.
    fn outcome(&self) -> Result<Option<RunOutcome>> {
        if let Some(why) = diverged(&self.folder)? {
            return Ok(Some(RunOutcome::Diverged(why)));
        }
        Ok(finished_run(&self.folder, &self.recipe()?)?.map(|_| RunOutcome::Finished))
    }
}

/// The reason in a run folder why the run diverged, if it did.
pub fn diverged(folder: &Path) -> Result<Option<String>> {
    let path = folder.join(DIVERGED);
    if !path.exists() {
        return Ok(None);
    }
    Ok(Some(fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?))
}

/// The loss by which runs are compared: held-out where it was measured, else in training.
pub(crate) fn comparable_loss(summary: &Summary) -> Option<f64> {
    summary.evaluation.as_ref().map(|e| e.loss).or(summary.train_loss)
}

/// What a node executes.
#[derive(Clone, Debug)]
pub enum Work {
    /// A training run.
    Train(Box<TrainRun>),
    /// Another command of `fox`.
    Command {
        /// Its arguments, the command's name first.
        arguments: Vec<String>,
        /// The file or folder that exists when it is complete.
        output: PathBuf,
        /// Whether it takes the arguments that choose a device.
        uses_device: bool,
    },
}

/// A node of the graph.
#[derive(Clone, Debug)]
pub struct Node {
    /// Name in progress lines; unique.
    pub label: String,
    /// What it executes.
    pub work: Work,
    /// Nodes that must be finished first.
    pub after: Vec<NodeId>,
    /// Of the nodes that are ready, the one with the lowest rank starts first.
    pub rank: usize,
    /// Whether nothing else may run at the same time, because its speed is measured.
    pub exclusive: bool,
    /// How it ended, once it has.
    pub outcome: Option<RunOutcome>,
    /// Whether it is executing.
    pub running: bool,
}

impl Node {
    /// A node that depends on no other.
    pub fn new(label: impl Into<String>, work: Work) -> Node {
        Node {
            label: label.into(),
            work,
            after: Vec::new(),
            rank: 0,
            exclusive: false,
            outcome: None,
            running: false,
        }
    }

    /// A training run that depends on no other node.
    pub fn train(run: TrainRun) -> Node {
        Node::new(run.label.clone(), Work::Train(Box::new(run)))
    }

    /// The training run of the node.
    pub fn run(&self) -> Option<&TrainRun> {
        match &self.work {
            Work::Train(run) => Some(run),
            Work::Command { .. } => None,
        }
    }

    /// The arguments of `fox`.
    pub fn arguments(&self) -> Vec<String> {
        match &self.work {
            Work::Train(run) => run.arguments(),
            Work::Command { arguments, .. } => arguments.clone(),
        }
    }

    /// Whether the command takes the arguments that choose a device.
    pub(crate) fn uses_device(&self) -> bool {
        matches!(self.work, Work::Train(_) | Work::Command { uses_device: true, .. })
    }

    /// The loss of a finished training run; infinite if it diverged. `None` while it is unknown.
    pub fn loss(&self) -> Result<Option<f64>> {
        match (self.run(), &self.outcome) {
            (Some(run), Some(RunOutcome::Finished)) => {
                let loss = Summary::read(&run.folder)?.as_ref().and_then(comparable_loss);
                Ok(Some(loss.unwrap_or(f64::INFINITY)))
            }
            (Some(_), Some(RunOutcome::Diverged(_))) => Ok(Some(f64::INFINITY)),
            _ => Ok(None),
        }
    }
}

/// Nodes with their states.
#[derive(Clone, Debug, Default)]
pub struct RunGraph {
    nodes: Vec<Node>,
}

impl RunGraph {
    /// Adds a node, or returns the one with the same label. A node whose output is on the disk is finished.
    pub fn add(&mut self, mut node: Node) -> Result<NodeId> {
        if let Some(id) = self.nodes.iter().position(|known| known.label == node.label) {
            return Ok(id);
        }
        node.outcome = match &node.work {
            Work::Train(run) => run.outcome()?,
            Work::Command { output, .. } => output.exists().then_some(RunOutcome::Finished),
        };
        // The weights of a finished run may have been removed to save space. If a new command needs them, the run is
        // trained again.
        if node.outcome.is_none() {
            for &id in &node.after {
                let earlier = &mut self.nodes[id];
                let exported = earlier.run().is_none_or(|run| run.folder.join(EXPORT).exists());
                if earlier.outcome == Some(RunOutcome::Finished) && !exported {
                    earlier.outcome = None;
                }
            }
        }
        self.nodes.push(node);
        Ok(self.nodes.len() - 1)
    }

    /// A node.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id]
    }

    /// All nodes, in the order they were added.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Marks the next node as running: of all whose dependencies are finished the one with the lowest rank.
    pub(crate) fn start_next(&mut self) -> Option<NodeId> {
        let finished = |id: &NodeId| self.nodes[*id].outcome == Some(RunOutcome::Finished);
        let ready = |node: &Node| {
            node.outcome.is_none() && !node.running && node.after.iter().all(finished)
        };
        let candidates = (0..self.nodes.len()).filter(|id| ready(&self.nodes[*id]));
        let next = candidates.min_by_key(|id| (self.nodes[*id].rank, *id))?;
        self.nodes[next].running = true;
        Some(next)
    }

    /// Records how a node ended.
    pub fn end(&mut self, id: NodeId, outcome: RunOutcome) -> Result<()> {
        let node = &mut self.nodes[id];
        node.running = false;
        let outcome = match (outcome, &node.work) {
            (RunOutcome::Diverged(why), Work::Train(run)) => {
                durable::write(&run.folder.join(DIVERGED), why.as_bytes())?;
                RunOutcome::Diverged(why)
            }
            (RunOutcome::Finished, Work::Train(run)) => match run.outcome()? {
                Some(outcome) => outcome,
                None => RunOutcome::Failed("it left no summary".into()),
            },
            (outcome, _) => outcome,
        };
        node.outcome = Some(outcome);
        Ok(())
    }

    /// Puts a node back that was interrupted before its end.
    pub fn interrupt(&mut self, id: NodeId) {
        self.nodes[id].running = false;
    }

    /// Nodes that failed, with the reason.
    pub fn failures(&self) -> impl Iterator<Item = (&str, &str)> {
        self.nodes.iter().filter_map(|node| match &node.outcome {
            Some(RunOutcome::Failed(why)) => Some((node.label.as_str(), why.as_str())),
            _ => None,
        })
    }
}

/// An experiment that builds its graph as results become known.
pub trait Experiment {
    /// Adds nodes: called before the first node starts, and after each node that ended, with its id and the seconds it
    /// took.
    fn update(&mut self, graph: &mut RunGraph, ended: Option<(NodeId, f64)>) -> Result<()>;
}

/// A graph that is complete from the start.
impl Experiment for () {
    fn update(&mut self, _: &mut RunGraph, _: Option<(NodeId, f64)>) -> Result<()> {
        Ok(())
    }
}

/// A label as the name of a folder.
pub(crate) fn folder_name(label: &str) -> String {
    let plain = |c: char| if c.is_alphanumeric() || "+-_.".contains(c) { c } else { '_' };
    label.chars().map(plain).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(label: &str, output: &Path) -> Node {
        let output = output.join(label);
        Node::new(label, Work::Command { arguments: vec!["x".into()], output, uses_device: true })
    }

    #[test]
    fn starts_by_rank_after_dependencies() {
        let dir = tempfile::tempdir().unwrap();
        let mut graph = RunGraph::default();
        let first = graph.add(Node { rank: 2, ..command("first", dir.path()) }).unwrap();
        let after = Node { after: vec![first], ..command("after", dir.path()) };
        let after = graph.add(after).unwrap();
        let low = graph.add(Node { rank: 1, ..command("low", dir.path()) }).unwrap();
        assert_eq!(graph.add(command("low", dir.path())).unwrap(), low);
        assert_eq!((graph.start_next(), graph.start_next()), (Some(low), Some(first)));
        assert_eq!(graph.start_next(), None, "`after` waits for `first`");
        graph.end(first, RunOutcome::Finished).unwrap();
        assert_eq!(graph.start_next(), Some(after));
        graph.interrupt(after);
        assert_eq!(graph.start_next(), Some(after));
    }

    #[test]
    fn failure_blocks_only_dependents() {
        let dir = tempfile::tempdir().unwrap();
        let mut graph = RunGraph::default();
        let bad = graph.add(command("bad", dir.path())).unwrap();
        graph.add(Node { after: vec![bad], ..command("after", dir.path()) }).unwrap();
        let other = graph.add(command("other", dir.path())).unwrap();
        assert_eq!(graph.start_next(), Some(bad));
        graph.end(bad, RunOutcome::Failed("why".into())).unwrap();
        assert_eq!((graph.start_next(), graph.start_next()), (Some(other), None));
        assert_eq!(graph.failures().collect::<Vec<_>>(), [("bad", "why")]);
    }

    #[test]
    fn skips_existing_outputs() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("done"), "").unwrap();
        let mut graph = RunGraph::default();
        let done = graph.add(command("done", dir.path())).unwrap();
        assert_eq!(graph.node(done).outcome, Some(RunOutcome::Finished));
        assert_eq!(graph.start_next(), None);
    }

    #[test]
    fn retrains_a_run_whose_export_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        let run = TrainRun {
            label: "run".into(),
            spec: "tiny-fox-pro".into(),
            settings: Vec::new(),
            data: None,
            folder: dir.path().join("run"),
        };
        let mut graph = RunGraph::default();
        let id = graph.add(Node::train(run)).unwrap();
        graph.nodes[id].outcome = Some(RunOutcome::Finished);
        fs::write(dir.path().join("known"), "").unwrap();
        graph.add(Node { after: vec![id], ..command("known", dir.path()) }).unwrap();
        assert_eq!(graph.node(id).outcome, Some(RunOutcome::Finished));
        graph.add(Node { after: vec![id], ..command("new", dir.path()) }).unwrap();
        assert_eq!(graph.start_next(), Some(id));
    }
}
