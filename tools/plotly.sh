#!/bin/sh
# Fetches the part of plotly.js that draws the report, in the version of .venv's plotly.
# The Python package has only the whole script, which is four times as large.
set -eu
cd "$(dirname "$0")/.."

version=$(.venv/bin/python -c \
    'from plotly.offline import get_plotlyjs_version as version; print(version())')
report=$(pwd)/jaxrl_post/records/report
if head -n 2 "$report/plotly-basic.min.js" | grep -q " v$version\$"; then
    exit 0
fi
mkdir -p build/plotly
cd build/plotly
npm pack --silent "plotly.js-basic-dist-min@$version" | xargs tar xzf
cp package/plotly-basic.min.js "$report"/
cp package/LICENSE "$report"/plotly-basic.LICENSE
