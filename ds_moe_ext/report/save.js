// SPDX-License-Identifier: Apache-2.0
// A button on every chart that saves it as it is seen: an SVG file with all styles in it.
const STYLES=['fill','stroke','stroke-width','stroke-dasharray','opacity','font-size','vector-effect'];
const attributes=given=>Object.entries(given).map(([name,value])=>' '+name+'="'
 +escape(''+value)+'"').join('');
const inlined=node=>{const made=node.cloneNode(false),style=getComputedStyle(node);
 made.removeAttribute('class');made.removeAttribute('tabindex');
 STYLES.forEach(name=>made.style.setProperty(name,style.getPropertyValue(name)));
 node.childNodes.forEach(child=>made.append(child.nodeType===1?inlined(child):child.cloneNode()));
 return made};
const drawing=chart=>{
 const base=chart.getBoundingClientRect(),parts=[];
 const at=box=>({x:box.left-base.left,y:box.top-base.top,width:box.width,height:box.height});
 const write=node=>{ // the words of a text, line by line
  const style=getComputedStyle(node.parentElement),range=document.createRange(),lines=new Map();
  for(const word of node.data.matchAll(/\S+/g)){
   range.setStart(node,word.index);range.setEnd(node,word.index+word[0].length);
   const box=at(range.getBoundingClientRect()),key=Math.round(box.y);
   if(!box.width)continue;
   if(lines.has(key))lines.get(key).text+=' '+word[0];
   else lines.set(key,{x:box.x,y:box.y+box.height*.78,text:word[0]})}
  lines.forEach(({x,y,text})=>parts.push('<text'+attributes({x,y,fill:style.color,
   'font-size':style.fontSize,'font-weight':style.fontWeight})+'>'+escape(text)+'</text>'))};
 const walk=node=>{
  if(node.nodeType===3){write(node);return}
  if(node.nodeType!==1||node.matches('script,select,.tools,.save')||!node.getClientRects().length)return;
  const box=at(node.getBoundingClientRect()),style=getComputedStyle(node);
  if(node.tagName==='svg'){const made=inlined(node);
   Object.entries(box).forEach(([name,value])=>made.setAttribute(name,value));
   parts.push(new XMLSerializer().serializeToString(made));return}
  if(node.tagName==='IMG'){parts.push('<image'+attributes({...box,href:node.src,
   preserveAspectRatio:'none',style:'image-rendering:pixelated;filter:'+style.filter})+'/>');return}
  if(style.backgroundColor!=='rgba(0, 0, 0, 0)')
   parts.push('<rect'+attributes({...box,rx:parseFloat(style.borderRadius)||0,
    fill:style.backgroundColor})+'/>');
  if(style.borderLeftStyle==='dashed')parts.push('<path'+attributes({
   d:'M'+box.x+' '+box.y+'v'+box.height,stroke:style.borderLeftColor,'stroke-dasharray':'2 3'})+'/>');
  node.childNodes.forEach(walk)};
 chart.childNodes.forEach(walk);
 const room=12,width=base.width+2*room,height=base.height+2*room;
 const style=getComputedStyle(chart.closest('section')||root);
 return '<svg xmlns="http://www.w3.org/2000/svg"'+attributes({width,height,
  viewBox:[-room,-room,width,height].join(' '),'font-family':'system-ui, sans-serif'})+'>\n<rect'
  +attributes({x:-room,y:-room,width,height,fill:style.backgroundColor})+'/>'+parts.join('\n')
  +'</svg>\n'};
const above={};
document.querySelectorAll('h2,h3,h4,.lines,.heat,.map,.bars,.stacked,.timeline,.pass').forEach(chart=>{
 if(chart.tagName[0]==='H'){above[chart.tagName]=chart.textContent.split(':')[0];
  for(const tag of ['H3','H4'])if(tag>chart.tagName)delete above[tag];return}
 const phase=chart.matches('.pass')?chart.querySelector('b').textContent:'';
 const told=[...Object.values(above),chart.matches('.map')?'map':phase].join(' ').toLowerCase();
 const name=(told.match(/[a-z0-9]+/g)||['chart']).join('-').slice(0,120);
 const button=document.createElement('button');button.className='save';button.textContent='SVG';
 button.type='button';button.title='save this chart as an SVG file';
 button.addEventListener('click',()=>{const link=document.createElement('a');
  link.href=URL.createObjectURL(new Blob([drawing(chart)],{type:'image/svg+xml'}));
  link.download=name+'.svg';link.click();
  setTimeout(()=>URL.revokeObjectURL(link.href),1e4)});
 chart.classList.add('chart');chart.append(button)});
