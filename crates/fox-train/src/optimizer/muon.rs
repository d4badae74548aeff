//! Muon: momentum, orthogonalised (Jordan et al. 2024).
//!
//! ```text
//! matrices of the blocks:   B = momentum B + (1 - momentum) G
//!                           M = momentum B + (1 - momentum) G        (Nesterov; B itself without it)
//!                           W = (1 - lr weight_decay) W - lr scale(rows, cols) U V^T,   M = U S V^T
//! everything else:          AdamW at the learning rate lr * adamw_lr
//! ```
//!
//! The gradient of a matrix is nearly of low rank; `U V^T`, which has the same directions but equal weights for
//! them, makes use of the rare ones too. It is computed by a few Newton-Schulz steps, see
//! [`MatrixOps::orthogonalize`](fox_tensor::MatrixOps::orthogonalize).
//!
//! Matrices are those of linear layers inside the blocks, gates and shifts included. The embedding, the output
//! projection, vectors and the filters of convolutions go to AdamW. Matrices that are stored as one, such as
//! `[gate | up]` of the MLP, are orthogonalised one by one, see [`ParamSpec::matrices`].

use fox_model::{ParamGroup, ParamSpec};
use fox_tensor::{Blend, Device, MatrixStack, StackedMatrix};
use serde::{Deserialize, Serialize};

use super::{AdamW, Optimizer, Rule, StepInput, Trained};
use crate::Result;

/// The size of an orthogonalised step, by the shape of the matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scale {
    /// `0.2 sqrt(max(rows, cols))`: steps have a root mean square of 0.2, about that of AdamW's, so that one
    /// learning rate and one weight decay serve both groups, and rates found for AdamW fit (Liu et al. 2025).
    #[default]
    Rms,
    /// `sqrt(max(1, rows / cols))`: steps change a layer's output by about the learning rate, whatever the
    /// shape. As first published; learning rates are some 20 times AdamW's, so `adamw_lr` should be lower.
    Spectral,
}

impl Scale {
    fn of(self, rows: usize, cols: usize) -> f64 {
        let (rows, cols) = (rows as f64, cols as f64);
        match self {
            Scale::Rms => 0.2 * rows.max(cols).sqrt(),
            Scale::Spectral => (rows / cols).max(1.0).sqrt(),
        }
    }
}

/// Settings of Muon.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Muon {
    /// Decay of the momentum.
    pub momentum: f64,
    /// Whether the gradient counts once more on top of the momentum.
    pub nesterov: bool,
    /// Newton-Schulz steps.
    pub newton_schulz_steps: usize,
    /// The size of a step by the shape of the matrix.
    pub scale: Scale,
    /// Decoupled weight decay, of matrices and of AdamW's parameters that have it.
    pub weight_decay: f64,
    /// Learning rate of AdamW's parameters relative to that of the matrices.
    pub adamw_lr: f64,
    /// AdamW: decay of the first moment.
    pub beta1: f64,
    /// AdamW: decay of the second moment.
    pub beta2: f64,
    /// AdamW: added to the root of the second moment.
    pub eps: f64,
}

impl Default for Muon {
    fn default() -> Self {
        let AdamW { beta1, beta2, eps, weight_decay } = AdamW::default();
        Muon {
            momentum: 0.95,
            nesterov: true,
            newton_schulz_steps: 5,
            scale: Scale::Rms,
            weight_decay,
            adamw_lr: 1.0,
            beta1,
            beta2,
            eps,
        }
    }
}

impl Muon {
    fn adamw(&self) -> AdamW {
        let Muon { beta1, beta2, eps, weight_decay, .. } = *self;
        AdamW { beta1, beta2, eps, weight_decay }
    }
}

/// Whether Muon updates a parameter. A single row or column has one direction only, so nothing to even out.
fn is_matrix(spec: &ParamSpec) -> bool {
    let inside = matches!(spec.group, ParamGroup::Mixer | ParamGroup::Mlp);
    inside && !spec.matrices.is_empty() && spec.dims.iter().all(|side| *side > 1)
}

impl Rule for Muon {
    const NAME: &'static str = "muon";

    fn conditions(&self) -> Vec<(bool, &'static str, &'static str)> {
        let unit = |x: f64| (0.0..1.0).contains(&x);
        let steps = (1..=20).contains(&self.newton_schulz_steps);
        let mut conditions = self.adamw().conditions();
        conditions.extend([
            (unit(self.momentum), "momentum", "must be at least 0 and below 1"),
            (steps, "newton_schulz_steps", "must be between 1 and 20; 5 is usual"),
            (self.adamw_lr >= 0.0 && self.adamw_lr.is_finite(), "adamw_lr", "must be at least 0"),
        ]);
        conditions
    }
}

impl Optimizer for Muon {
    fn state(&self, spec: &ParamSpec) -> &'static [&'static str] {
        if is_matrix(spec) { &["momentum"] } else { self.adamw().state(spec) }
    }

    fn step(&self, device: &Device, params: Vec<Trained<'_>>, input: &StepInput) -> Result<()> {
        let (mut matrices, others): (Vec<_>, Vec<_>) =
            params.into_iter().partition(|param| is_matrix(param.spec));
        let backend = device.backend();
        let keep = self.momentum as f32;
        let fresh = ((1.0 - self.momentum) * input.grad_scale) as f32;
        let mut momenta = Vec::with_capacity(matrices.len());
        for param in &mut matrices {
            momenta.push(Blend::new(&mut param.state[0], param.grad, keep, fresh)?);
        }
        backend.blend(&mut momenta)?;
        // The direction replaces the gradient, which is unused from here on.
        let (again, momentum) = if self.nesterov { (fresh, keep) } else { (0.0, 1.0) };
        let mut directions = Vec::with_capacity(matrices.len());
        for param in &mut matrices {
            directions.push(Blend::new(param.grad, &param.state[0], again, momentum)?);
        }
        backend.blend(&mut directions)?;
        let mut stacks = Vec::with_capacity(matrices.len());
        for param in &mut matrices {
            let cols = param.spec.dims[1];
            let scale = |rows: usize| self.scale.of(rows, cols) as f32;
            let parts =
                param.spec.matrices.iter().map(|&rows| StackedMatrix { rows, factor: scale(rows) });
            stacks.push(MatrixStack::new(param.grad, parts.collect())?);
        }
        backend.orthogonalize(&mut stacks, self.newton_schulz_steps)?;
        let mut steps = Vec::with_capacity(matrices.len());
        for param in &mut matrices {
            let decay = if param.spec.decay { input.lr * self.weight_decay } else { 0.0 };
            let (keep, add) = ((1.0 - decay) as f32, -input.lr as f32);
            steps.push(Blend::new(param.value, param.grad, keep, add)?);
        }
        backend.blend(&mut steps)?;
        let lr = input.lr * self.adamw_lr;
        self.adamw().step(device, others, &StepInput { lr, ..*input })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{gradients, model, updater, values};
    use super::super::{OptimizerRecipe, Updater};
    use super::*;
    use fox_model::{Model, ModelConfig};
    use fox_tensor::newton_schulz;

    fn recipe(muon: &Muon) -> OptimizerRecipe {
        OptimizerRecipe { clip: f64::INFINITY, ..OptimizerRecipe::of(muon).unwrap() }
    }

    /// Two steps on the oracle, and the gradients of each by parameter.
    fn two_steps(recipe: &OptimizerRecipe) -> (Model, [Vec<Vec<f64>>; 2]) {
        let mut model = model(&Device::naive());
        let mut updater = updater(recipe, &model);
        let grads = [0.02, 0.03].map(|lr| {
            let gradients = gradients(&model);
            let mut seen = vec![Vec::new(); model.params().len()];
            for (id, grad) in gradients.iter() {
                seen[id.0] = grad.to_f64().unwrap();
            }
            updater.step(model.params_mut(), gradients, lr).unwrap();
            seen
        });
        (model, grads)
    }

    /// The same two steps of a matrix, written out.
    fn by_hand(muon: &Muon, spec: &ParamSpec, start: &[f64], grads: [&[f64]; 2]) -> Vec<f64> {
        let (mut p, mut b) = (start.to_vec(), vec![0.0; start.len()]);
        let mu = f64::from(muon.momentum as f32);
        for (grad, lr) in grads.into_iter().zip([0.02, 0.03]) {
            let mut m = b.clone();
            for ((b, m), g) in b.iter_mut().zip(&mut m).zip(grad) {
                *b = mu * *b + (1.0 - mu) * g;
                *m = if muon.nesterov { mu * *b + (1.0 - mu) * g } else { *b };
            }
            let (cols, mut row) = (spec.dims[1], 0);
            for &rows in &spec.matrices {
                let range = row * cols..(row + rows) * cols;
                newton_schulz(&mut m[range.clone()], rows, cols, 5, |x| x);
                let (r, c) = (rows as f64, cols as f64);
                let scale = match muon.scale {
                    Scale::Rms => 0.2 * r.max(c).sqrt(),
                    Scale::Spectral => (r / c).max(1.0).sqrt(),
                };
                for i in range {
                    p[i] = (1.0 - lr * 0.1) * p[i] - lr * scale * m[i];
                }
                row += rows;
            }
        }
        p
    }

    #[test]
    fn muon_updates_matrices_and_adamw_the_rest() {
        let spectral = Muon { scale: Scale::Spectral, nesterov: false, ..Muon::default() };
        for muon in [Muon::default(), spectral] {
            let start = model(&Device::naive());
            let (after, [first, second]) = two_steps(&recipe(&muon));
            // The second gradients belong to Muon's weights, so AdamW is followed for one parameter at a time.
            let (mut matrices, mut stacked) = (Vec::new(), 0);
            for (id, spec, value) in after.params().iter().filter(|(_, spec, _)| spec.trainable) {
                let begin = start.params().value(id).to_f64().unwrap();
                let want = if is_matrix(spec) {
                    matrices.push(spec.name.rsplit('.').nth(1).unwrap_or_default().to_string());
                    stacked += usize::from(spec.matrices.len() > 1);
                    by_hand(&muon, spec, &begin, [&first[id.0], &second[id.0]])
                } else {
                    adamw_by_hand(&begin, [&first[id.0], &second[id.0]], spec.decay)
                };
                let error = fox_tensor::cases::relative_error(&value.to_f64().unwrap(), &want);
                assert!(error < 1e-6, "{}: {error:.1e}", spec.name);
            }
            matrices.sort();
            let names = [
                "down_proj",
                "gate_proj",
                "linear",
                "linear",
                "o_proj",
                "ogate_proj",
                "q_proj",
                "shift_proj",
                "shift_proj",
            ];
            assert_eq!((matrices, stacked), (names.map(String::from).to_vec(), 1));
        }
    }

    fn adamw_by_hand(start: &[f64], grads: [&[f64]; 2], decay: bool) -> Vec<f64> {
        let mut p = start.to_vec();
        for (i, p) in p.iter_mut().enumerate() {
            let (mut m, mut v) = (0.0, 0.0);
            for (n, (grad, lr)) in grads.into_iter().zip([0.02, 0.03]).enumerate() {
                m = 0.9 * m + 0.1 * grad[i];
                v = 0.95 * v + 0.05 * grad[i] * grad[i];
                let (a, b) = (1.0 - 0.9f64.powi(n as i32 + 1), 1.0 - 0.95f64.powi(n as i32 + 1));
                let decayed = if decay { 0.1 * *p } else { 0.0 };
                *p -= lr * (m / a / ((v / b).sqrt() + 1e-8) + decayed);
            }
        }
        p
    }

    #[test]
    fn adamw_lr_applies_to_the_rest() {
        let still = Muon { adamw_lr: 0.0, ..Muon::default() };
        let (start, after) = (model(&Device::naive()), two_steps(&recipe(&still)).0);
        for ((_, spec, value), (before, after)) in
            start.params().iter().zip(values(&start).into_iter().zip(values(&after)))
        {
            assert_eq!(before == after, !is_matrix(spec), "{} {}", spec.name, value.len());
        }
    }

    /// Every matrix, whatever its shape, moves by the root mean square of about 0.2 learning rates.
    #[test]
    fn steps_are_of_one_size() {
        let muon = Muon { weight_decay: 0.0, ..Muon::default() };
        let mut model = model(&fox_cpu::device());
        let (mut updater, gradients, lr) =
            (updater(&recipe(&muon), &model), gradients(&model), 0.01);
        let before = values(&model);
        updater.step(model.params_mut(), gradients, lr).unwrap();
        let after = values(&model);
        for (i, (_, spec, _)) in model.params().iter().enumerate() {
            if is_matrix(spec) {
                let squares =
                    before[i].iter().zip(&after[i]).map(|(a, b)| f64::from(a - b).powi(2));
                let rms = (squares.sum::<f64>() / before[i].len() as f64).sqrt() / lr;
                assert!((0.1..0.24).contains(&rms), "{}: {rms}", spec.name);
            }
        }
    }

    #[test]
    fn matrix_state_is_half_of_adamw() {
        let config = ModelConfig::fox_pro(64, 2, 2).with_vocab(100);
        for spec in config.param_specs() {
            let state = Muon::default().state(&spec);
            assert_eq!(state.len(), if is_matrix(&spec) { 1 } else { 2 }, "{}", spec.name);
        }
        let device = fox_cpu::device();
        let model = Model::init(&config, 0, &device).unwrap();
        let before = device.memory().in_use;
        let recipe = OptimizerRecipe::of(&Muon::default()).unwrap();
        let updater = Updater::new(&recipe, None, model.params(), &device).unwrap();
        let bytes: usize = config
            .param_specs()
            .iter()
            .map(|spec| 4 * spec.count() * Muon::default().state(spec).len())
            .sum();
        let taken = device.memory().in_use - before;
        assert!(taken >= bytes && taken < bytes * 5 / 4, "{taken} {bytes}");
        drop(updater);
    }

    /// A direction has no length, so clipping shows in what later steps remember of a gradient; and not every matrix
    /// has weight decay.
    #[test]
    fn clipping_and_decay_scale_muon_updates() {
        let (device, muon) = (Device::naive(), Muon::default());
        let all = |x: f32| device.from_f32(&[x, 0.0, 0.0, x], [2, 2]).unwrap();
        let spec = |decay| ParamSpec {
            name: "m".into(),
            dims: vec![2, 2],
            group: ParamGroup::Mlp,
            decay,
            trainable: true,
            matrices: vec![2],
            init: fox_model::Init::Constant(0.0),
        };
        for decay in [true, false] {
            let (mut value, mut grad, mut state) = (all(1.0), all(3.0), [all(0.5)]);
            let spec = spec(decay);
            let trained =
                Trained { spec: &spec, value: &mut value, grad: &mut grad, state: &mut state };
            let input = StepInput { lr: 0.0, update: 1, grad_scale: 0.1 };
            muon.step(&device, vec![trained], &input).unwrap();
            let momentum = state[0].to_f64().unwrap()[0];
            assert!((momentum - (0.95 * 0.5 + 0.05 * 0.3)).abs() < 1e-6, "{momentum}");
            // Without a gradient there is no direction, and decay is all that is left.
            let (mut grad, mut state) = (all(0.0), [all(0.0)]);
            let trained =
                Trained { spec: &spec, value: &mut value, grad: &mut grad, state: &mut state };
            let input = StepInput { lr: 0.5, update: 2, grad_scale: 1.0 };
            muon.step(&device, vec![trained], &input).unwrap();
            let want = if decay { 1.0 - 0.5 * 0.1 } else { 1.0 };
            assert!((value.to_f64().unwrap()[0] - want).abs() < 1e-6, "{value:?}");
        }
    }
}
