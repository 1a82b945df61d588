from .plugin import Export as Export
