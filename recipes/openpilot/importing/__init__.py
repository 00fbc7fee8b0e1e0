"""Import of ONNX graphs as trainable torch modules: `import_onnx`.

    graph = import_onnx("driving_policy.onnx")
    plan = graph(**inputs)  # with any number of rows, where the file has one

There is one file for each family of operators, with a table from ONNX's names to functions that
make a step of a node. A new operator is one more entry there. `nodes.py` explains the batch axis of
steps.
"""

from recipes.openpilot.importing.graph import import_onnx as import_onnx
from recipes.openpilot.importing.module import ImportedGraph as ImportedGraph
