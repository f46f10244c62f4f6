#!/bin/sh
# Write the JSON Schema of a dashboard, from Grafana's own types, to where the tests look for it.
set -eu
folder="${XDG_CACHE_HOME:-$HOME/.cache}/sluice/grafana"
mkdir -p "$folder"
cd "$folder"
npm install --no-audit --no-fund @grafana/schema@13.2.3 ts-json-schema-generator@2 typescript@5
npx ts-json-schema-generator --no-type-check --type Dashboard \
    --path node_modules/@grafana/schema/dist/types/raw/dashboard/x/types.gen.d.ts \
    > dashboard.schema.json.new
mv dashboard.schema.json.new dashboard.schema.json
