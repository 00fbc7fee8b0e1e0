"""ONNX graphs as trainable torch modules: `import_onnx`.

    graph = import_onnx("driving_policy.onnx")
    plan = graph(**inputs)  # with any number of rows, where the file has one

One file for each family of operators, each a table from ONNX's names to what makes a step of a
node; a new operator is one more entry there. `nodes.py` says how steps treat rows.
"""

from recipes.openpilot.importing.graph import import_onnx as import_onnx
from recipes.openpilot.importing.module import ImportedGraph as ImportedGraph
