//! The fields of config.json that only the recurrent families have.

use serde_json::{Map, Value, json};

use super::{DeltaConfig, Hgrn2Config, LowerBounds, Mamba2Config, MixerConfig, ModelConfig};
use super::{ModelType, write::object};

impl ModelConfig {
    /// The fields of the mixer; empty for attention.
    pub(super) fn recurrent_fields(&self, model_type: ModelType) -> Map<String, Value> {
        match &self.mixer {
            MixerConfig::Forgetting(_) => Map::new(),
            MixerConfig::Delta(mixer) => self.delta_fields(mixer),
            MixerConfig::Hgrn2(mixer) => hgrn2_fields(mixer),
            MixerConfig::Mamba2(mixer) => self.mamba2_fields(mixer, model_type),
        }
    }

    fn delta_fields(&self, mixer: &DeltaConfig) -> Map<String, Value> {
        let mut map = object(json!({
            "attn_mode": "chunk",
            "num_heads": mixer.heads,
            "conv_size": mixer.conv_size,
            "use_gate": mixer.output_gate,
            "use_short_conv": true,
            "allow_neg_eigval": mixer.negative_eigenvalues,
            "attn": null,
        }));
        map.extend(object(if mixer.decay {
            json!({
                "head_dim": mixer.key_dim,
                "num_v_heads": mixer.value_heads,
                "expand_v": mixer.value_dim as f64 / mixer.key_dim as f64,
            })
        } else {
            let expand = |dim: usize| (mixer.heads * dim) as f64 / self.hidden_size as f64;
            json!({
                "expand_k": expand(mixer.key_dim),
                "expand_v": expand(mixer.value_dim),
                "use_beta": true,
                "use_output_norm": true,
                "qk_norm": "l2",
                "qk_activation": "silu",
            })
        }));
        map
    }

    fn mamba2_fields(&self, mixer: &Mamba2Config, model_type: ModelType) -> Map<String, Value> {
        // Python's bare literal, as the references write it; the writer takes off the quotes.
        let real = |x: f64| if x.is_infinite() { json!("Infinity") } else { json!(x) };
        let limit = [real(mixer.time_step_limit.0), real(mixer.time_step_limit.1)];
        let (min, max, floor) = mixer.time_step_init;
        let mut map = object(json!({
            "num_heads": mixer.heads,
            "head_dim": mixer.head_dim,
            "state_size": mixer.state_size,
            "expand": mixer.inner() as f64 / self.hidden_size as f64,
            "n_groups": mixer.groups,
            "conv_kernel": mixer.conv_size,
            "use_bias": false,
            "use_conv_bias": true,
            "hidden_act": "silu",
            "chunk_size": 256,
            "residual_in_fp32": true,
            "rescale_prenorm_residual": true,
        }));
        if let Some(expand) = map.get("expand").and_then(Value::as_f64)
            && expand.fract() == 0.0
        {
            map.insert("expand".into(), json!(expand as u64));
        }
        map.extend(object(match model_type {
            ModelType::OfficialMamba2 => json!({
                "layer_norm_epsilon": self.norm_eps,
                "rms_norm": true,
                "time_step_min": min,
                "time_step_max": max,
                "time_step_floor": floor,
                "time_step_limit": limit,
            }),
            _ => json!({
                "norm_eps": self.norm_eps,
                "rmsnorm": true,
                "norm_before_gate": mixer.norm_before_gate,
                "D_has_hdim": false,
                "dt_min": min,
                "dt_max": max,
                "dt_init_floor": floor,
                "dt_limit": limit,
            }),
        }));
        map
    }

    /// What a recurrent format cannot say about this model.
    pub(super) fn recurrent_obstacles(&self, model_type: ModelType) -> Vec<(bool, &'static str)> {
        let wrong = |family: &'static str| vec![(true, family)];
        match (&self.mixer, model_type) {
            (MixerConfig::Forgetting(_), _) => wrong("softmax attention"),
            (MixerConfig::Delta(m), ModelType::OfficialDeltaNet) if !m.decay => {
                vec![(m.negative_eigenvalues, "allow_neg_eigval")]
            }
            (MixerConfig::Delta(m), ModelType::FlaDeltaNet) if !m.decay => Vec::new(),
            (MixerConfig::Delta(m), ModelType::FlaGatedDeltaNet) if m.decay => Vec::new(),
            (MixerConfig::Hgrn2(m), ModelType::OfficialHgrn2) => vec![
                (m.lower_bounds == LowerBounds::Used, "lower bounds that have an effect"),
                (m.output_norm_eps != self.norm_eps, "an output norm with an epsilon of its own"),
            ],
            (MixerConfig::Hgrn2(m), ModelType::FlaHgrn2) => vec![
                (m.lower_bounds == LowerBounds::Stored, "lower bounds without effect"),
                (m.output_norm_eps != 1e-5, "an output norm with another epsilon than 1e-5"),
                (m.heads * m.expand_ratio != self.hidden_size, "num_heads beside expand_ratio"),
            ],
            (MixerConfig::Mamba2(m), ModelType::OfficialMamba2) => {
                vec![(m.norm_before_gate, "norm_before_gate"), (m.groups != 1, "n_groups above 1")]
            }
            (MixerConfig::Mamba2(_), ModelType::FlaMamba2) => Vec::new(),
            (MixerConfig::Delta(m), _) if m.decay => wrong("Gated DeltaNet"),
            (MixerConfig::Delta(_), _) => wrong("DeltaNet"),
            (MixerConfig::Hgrn2(_), _) => wrong("HGRN2"),
            (MixerConfig::Mamba2(_), _) => wrong("Mamba-2"),
        }
    }
}

fn hgrn2_fields(mixer: &Hgrn2Config) -> Map<String, Value> {
    object(json!({
        "attn_mode": "chunk",
        "num_heads": mixer.heads,
        "expand_ratio": mixer.expand_ratio,
        "use_short_conv": false,
        "conv_size": 4,
        "use_lower_bound": mixer.lower_bounds != LowerBounds::None,
        "attn": null,
    }))
}
