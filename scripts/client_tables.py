"""Tables of what bench/clients.py and bench/training.py wrote: models of other libraries, and a small transformer in training."""

from typing import Any

from cells import short, table

__all__ = ["CLIENT_TABLES", "client_title"]


def client_title(record: dict[str, Any]) -> str:
    """What it was measured on."""
    libraries = ", ".join(f"{name} {record[name]}" for name in ("torch", "transformers", "diffusers") if name in record)
    return f"**{record['card']}**, csrc `{record['csrc_tree'][:12]}`, {libraries}, {record['date']}."


def clients_table(record: dict[str, Any]) -> list[str]:
    """A model's call with the library's default and with attention_ext."""
    rows = []
    for name, row in record["clients"].items():
        if "not_available" in row:
            rows.append([name, f"not measured: {row['not_available']}", *[""] * 4])
            continue
        both = [row["attention_ext"], row["default"]]
        memory = ", ".join(f"{one['peak_bytes'] / 2**20:.0f}" for one in both)
        kernels = ", ".join(f"{count} {name}" for name, count in row["attention_ext"]["kernels"].items())
        rows.append([name, *(short(one["ms"]) for one in both), f"{row['ratio']:.2f}", memory, kernels])
    return table("model | attention_ext, ms | default, ms | ratio | peak memory, MiB: ours, default's | what ran", rows)


def training_table(record: dict[str, Any]) -> list[str]:
    """Time of a step, the last loss, and how far the curve is from that of PyTorch's formula."""
    rows = []
    for name, run in record["training"].items():
        distance = record["distance"].get(name)
        losses = run["losses"]
        last = sum(losses[-10:]) / len(losses[-10:])
        rows.append([name, short(run["ms_per_step"]), f"{losses[0]:.3f}", f"{last:.4f}", f"{distance:.2g}" if distance else ""])
    header = "attention | ms a step | first loss | mean of the last ten | mean distance of the loss from math's"
    return table(header, rows)


# Name of the place in a page -> (beginning of the files' names in bench/results, table, script).
CLIENT_TABLES = {
    "clients": ("clients_", clients_table, "bench/clients.py"),
    "training": ("training_", training_table, "bench/training.py"),
}
