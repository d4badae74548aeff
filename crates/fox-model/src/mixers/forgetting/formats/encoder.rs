//! The format of encoders: the fields and names of the native format under another `model_type`, so that software that
//! knows only causal models refuses the file instead of hiding later tokens.

use fox_tensor::Mask;

use super::native;
use crate::mixers::forgetting::ForgettingConfig;
use crate::mixers::{CheckpointLayout, CommonFields, Format, enabled};

/// `fox_encoder`.
pub(super) static ENCODER: Format<ForgettingConfig> = Format {
    common: CommonFields { sigmoid_mlp: true, ..CommonFields::DEFAULT },
    suits: |mixer, _| mixer.mask == Mask::Bidirectional,
    lacks: |mixer, _| enabled(&[(mixer.mask == Mask::Causal, "causal attention")]),
    ..Format::new(
        "fox_encoder",
        CheckpointLayout::NATIVE,
        "FoxForMaskedLM",
        |fields| Ok(native::read(fields)?.bidirectional()),
        native::write,
    )
};
