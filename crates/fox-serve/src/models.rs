//! `/v1/models`: the served model.

use serde_json::{Value, json};

use crate::app::App;
use crate::error::{ApiError, ApiResult};

/// The model card, under one of the names of the model.
pub(crate) fn card(app: &App, name: &str) -> Value {
    let config = app.engine.model().config();
    json!({
        "id": name,
        "object": "model",
        "created": app.created,
        "owned_by": "fox",
        "max_model_len": app.engine.options().max_context,
        "vocab_size": config.vocab_size,
        "layers": config.num_layers,
        "heads": config.heads().0,
    })
}

/// The model cards of all names.
pub(crate) fn list(app: &App) -> Value {
    let names = std::iter::once(&app.name).chain(&app.options.aliases);
    let cards: Vec<Value> = names.map(|name| card(app, name)).collect();
    json!({ "object": "list", "data": cards })
}

/// # Errors
/// 404 for a name that is not one of the model's.
pub(crate) fn check_name(app: &App, name: &str) -> ApiResult<()> {
    if name == app.name || app.options.aliases.iter().any(|alias| alias == name) {
        return Ok(());
    }
    let message = format!("there is no model {name}; this server has {}", app.name);
    Err(ApiError::missing(message, Some("model_not_found")).with_param(Some("model".into())))
}
