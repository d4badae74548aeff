"""The command line of lm-evaluation-harness with foxlm's models: python -m foxlm.lm_eval --model hf --model_args
pretrained=FOLDER --tasks ..."""


from ._extras import require


def main() -> None:
    """Registers the models and runs the command line."""
    try:
        require("lm_eval", "lm-eval", "foxlm.lm_eval")
    except ImportError as error:
        raise SystemExit(str(error)) from error
    from lm_eval.__main__ import cli_evaluate

    import foxlm.hf  # noqa: F401, registers the models

    cli_evaluate()


if __name__ == "__main__":
    main()
