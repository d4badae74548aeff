//! Layers that compute nothing: what they write depends on sequence, position and layer alone.
#![allow(clippy::unwrap_used, clippy::expect_used, dead_code)] // every test uses a part of it

use fox_cache::{
    AttentionStateSpec, Cache, ConvStateSpec, LayerState, PagePolicy, RecurrentStateSpec, Result,
    StateSpec,
};
use fox_tensor::{AttentionWeights, Device, Segment, Segments, Tensor};

/// An attention layer with heads of width 4 and a shift of the keys.
pub fn attention(heads: usize, kv_heads: usize, gated: bool, window: Option<usize>) -> StateSpec {
    StateSpec::Attention(AttentionStateSpec {
        heads,
        kv_heads,
        head_dim: 4,
        gated,
        k_shift: true,
        v_shift: false,
        window,
        weights: AttentionWeights::Softmax,
        transition: 0,
        conv: None,
    })
}

/// A recurrent layer with one convolution.
pub fn recurrent() -> StateSpec {
    StateSpec::Recurrent(RecurrentStateSpec {
        convs: vec![ConvStateSpec { channels: 6, taps: 4 }],
        scan: 10,
    })
}

/// Some layers on a device.
pub struct Toy {
    pub specs: Vec<StateSpec>,
    pub policy: PagePolicy,
    pub device: Device,
    /// By how much each query head decays per token, on average.
    pub decay: fn(usize) -> f32,
}

/// A number in -1..1 that depends on all arguments.
fn value(sequence: usize, position: usize, layer: usize, column: usize) -> f32 {
    let mix = [sequence, position, layer, column]
        .iter()
        .fold(17u32, |mix, &x| (mix ^ x as u32).wrapping_mul(0x9e37_79b1).rotate_left(13));
    (mix >> 8) as f32 / (1 << 23) as f32 - 1.0
}

impl Toy {
    /// A state of one sequence in pages.
    pub fn cache(&self) -> Cache {
        Cache::paged(self.specs.clone(), &self.policy, &self.device).unwrap()
    }

    /// `count[b]` new tokens for sequence `b`, which is number `ids[b]`; a pad row before each sequence.
    pub fn segments(counts: &[usize]) -> Segments {
        let mut start = 0;
        let segment = |&len: &usize| {
            start += len + 1;
            let first = start - len;
            Segment { q_start: first, q_len: len, k_start: first, k_len: len }
        };
        Segments::new(counts.iter().map(segment).collect()).unwrap()
    }

    /// What the layers make of a step: `[R, width]` with NaN in pads.
    fn rows(
        &self,
        cache: &Cache,
        (ids, new): (&[usize], &Segments),
        width: usize,
        value: impl Fn(usize, usize, usize) -> f32,
    ) -> Tensor {
        let rows = new.as_slice().last().map_or(0, |s| s.q_start + s.q_len);
        let mut data = vec![f32::NAN; rows * width];
        for ((s, &id), &len) in new.as_slice().iter().zip(ids).zip(cache.lens()) {
            for t in 0..s.q_len {
                for c in 0..width {
                    data[(s.q_start + t) * width + c] = value(id, len + t, c);
                }
            }
        }
        self.device.from_f32(&data, [rows, width]).unwrap()
    }

    /// The log gates `[R, H]` of a layer.
    pub fn gates(&self, cache: &Cache, ids: &[usize], new: &Segments, layer: usize) -> Tensor {
        let StateSpec::Attention(shape) = &self.specs[layer] else { panic!("not attention") };
        self.rows(cache, (ids, new), shape.heads, |id, t, h| {
            (self.decay)(h) * (value(id, t, layer, h) - 1.0)
        })
    }

    /// All of a step but its end.
    pub fn layers(&self, cache: &mut Cache, ids: &[usize], counts: &[usize]) -> Result<Segments> {
        let new = Toy::segments(counts);
        let placed = cache.begin(&new)?;
        for l in 0..self.specs.len() {
            match &self.specs[l] {
                StateSpec::Attention(shape) => {
                    let make = |kind: usize| {
                        let row = |id, t, c| value(id, t, l, 100 * kind + c);
                        self.rows(cache, (ids, &new), shape.width(), row)
                    };
                    let (k, v, uk) = (make(1), make(2), make(3));
                    let gates = shape.gated.then(|| self.gates(cache, ids, &new, l));
                    match &mut cache.layers_mut()[l] {
                        LayerState::Paged(state) => {
                            state.append((&k, &v), gates.as_ref(), (&uk, &v), &placed)?;
                        }
                        LayerState::Rows(state) => {
                            state.append((&k, &v), gates.as_ref(), (&uk, &v), &placed)?;
                        }
                        LayerState::Recurrent(_) | LayerState::Blocks(_) => panic!("not attention"),
                    }
                }
                StateSpec::Recurrent(shape) => {
                    let row = |id, t, c| value(id, t, l, c);
                    let x = self.rows(cache, (ids, &new), shape.convs[0].channels, row);
                    let lens = cache.lens().to_vec();
                    let state = cache.layers_mut()[l].recurrent().unwrap();
                    state.stage_conv(0, &x, &placed)?;
                    let mut scan = state.scan().to_f32().unwrap();
                    for (b, s) in new.as_slice().iter().enumerate() {
                        for t in 0..s.q_len {
                            scan[b * shape.scan] += value(ids[b], lens[b] + t, l, 7);
                        }
                    }
                    let after = self.device.from_f32(&scan, [lens.len(), shape.scan])?;
                    state.stage_scan(after);
                }
                StateSpec::Blocks(_) => panic!("closed blocks have their own tests"),
            }
        }
        Ok(new)
    }

    /// A step.
    pub fn step(&self, cache: &mut Cache, ids: &[usize], counts: &[usize]) {
        let new = self.layers(cache, ids, counts).unwrap();
        cache.commit(&new).unwrap();
    }

    /// Everything that a state remembers: sums of the gates, last rows, recurrent states.
    pub fn contents(&self, cache: &mut Cache) -> Vec<Vec<f64>> {
        let lens = cache.lens().to_vec();
        let mut all = vec![lens.iter().map(|&len| len as f64).collect()];
        for layer in cache.layers_mut() {
            let (last_k, last_v) = layer.last().unwrap();
            all.extend([last_k, last_v].iter().flatten().map(|x| x.to_f64().unwrap()));
            match layer {
                LayerState::Paged(state) => {
                    all.extend(state.sums().into_iter().map(<[f64]>::to_vec));
                    for keys in state.pages() {
                        all.push(vec![keys.seen() as f64]);
                        all.push(keys.ends().to_vec());
                        let heads = 0..keys.shape().kv_heads;
                        all.push(heads.map(|head| keys.dropped(head) as f64).collect());
                    }
                }
                LayerState::Recurrent(state) => {
                    all.extend([state.conv(0), state.scan()].map(|x| x.to_f64().unwrap()));
                }
                LayerState::Blocks(_) => panic!("closed blocks have their own tests"),
                LayerState::Rows(state) => all.extend(
                    [Some(state.keys()), Some(state.values()), state.log_gates()]
                        .iter()
                        .flatten()
                        .map(|x| x.to_f64().unwrap()),
                ),
            }
        }
        all
    }
}
