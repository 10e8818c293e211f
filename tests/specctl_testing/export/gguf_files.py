"""GGUF files of the embedded target in other types of numbers."""

from __future__ import annotations

from pathlib import Path


def rewritten(file: Path, path: Path, kinds: dict[str, str], has_head: bool = False) -> Path:
    """The file with these tensors (by an ending of their names) in other types; `has_head`: with a
    head of its own, which is the embedding's numbers."""
    import gguf

    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, inner)
    tensors = [(tensor.name, tensor) for tensor in reader.tensors]
    if has_head:
        tensors += [("output.weight", t) for t in reader.tensors if t.name == "token_embd.weight"]
    for name, tensor in tensors:
        wanted = next((kind for end, kind in kinds.items() if name.endswith(end)), "F32")
        kind = gguf.GGMLQuantizationType[wanted]
        data = tensor.data if wanted == "F32" else gguf.quants.quantize(tensor.data, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
