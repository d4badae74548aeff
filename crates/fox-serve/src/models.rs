//! The one model there is.

use serde_json::{Value, json};

use crate::app::App;
use crate::error::{ApiError, ApiResult};

/// What is known about it.
pub(crate) fn card(app: &App) -> Value {
    let config = app.engine.model().config();
    json!({
        "id": app.name,
        "object": "model",
        "created": app.created,
        "owned_by": "fox",
        "max_model_len": app.engine.options().max_context,
        "vocab_size": config.vocab_size,
        "layers": config.num_layers,
        "heads": config.heads().0,
    })
}

/// As a list.
pub(crate) fn list(app: &App) -> Value {
    json!({ "object": "list", "data": [card(app)] })
}

/// An error for every name but one.
pub(crate) fn check_name(app: &App, name: &str) -> ApiResult<()> {
    if name == app.name {
        return Ok(());
    }
    let message = format!("there is no model {name}; this server has {}", app.name);
    Err(ApiError::missing(message, Some("model_not_found")).with_param(Some("model".into())))
}
