"""Records from a data set of the Hugging Face hub, through the `datasets` library and its cache.

Must not know tokens or ranks.
"""

from __future__ import annotations

from fullshard.contracts.data import Records, Source
from fullshard.data.records import ArrowRecords
from fullshard.errors import DataError, first_line


class Hub(Source):
    """A data set by its hub name; downloaded once, then cached."""

    name: str
    """The data set, as on the hub: owner/name."""
    config: str | None = None
    """The configuration (subset), if the data set has several."""
    split: str = "train"
    """The split; slices such as train[:5%] work."""

    def open(self) -> Records:
        from datasets import load_dataset
        from datasets.exceptions import DatasetNotFoundError

        shown = " ".join(filter(None, (self.name, self.config, f"({self.split})")))
        try:
            dataset = load_dataset(self.name, self.config, split=self.split)
        except (ConnectionError, DatasetNotFoundError) as error:
            raise DataError(
                f"{shown}: cannot be fetched from the Hugging Face hub: {first_line(error)}. Check the name and the "
                "network; a private data set needs `hf auth login`; on a machine without network copy the data set "
                "there and give its folder as path."
            ) from error
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(f"{shown}: {first_line(error)}. Check name, config and split.") from error
        return ArrowRecords(dataset, name=shown)


__all__ = ["Hub"]
