"""Generates text from an exported folder with plain transformers.

python examples/generate.py ntp_logs/elsewhere/llama "def main("
"""

from __future__ import annotations

import argparse

import transformers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="made by `ntp export` or strategy.save_pretrained")
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=40)
    args = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.folder)
    prompt = tokenizer(args.prompt, return_tensors="pt", add_special_tokens=False)
    ids = model.generate(**prompt, max_new_tokens=args.tokens, do_sample=False)
    print(tokenizer.decode(ids[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
