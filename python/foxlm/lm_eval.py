"""The command line of lm-evaluation-harness with foxlm's models: python -m foxlm.lm_eval --model hf --model_args
pretrained=FOLDER --tasks ..."""


def main() -> None:
    """Registers the models and runs the command line."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise SystemExit("lm_eval is missing; pip install 'lm-eval[hf]'") from error
    import foxlm.hf  # noqa: F401, registers the models

    cli_evaluate()


if __name__ == "__main__":
    main()
